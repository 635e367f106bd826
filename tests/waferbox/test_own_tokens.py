"""Which secret and which token a process finds, and what it shows to whom."""

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from waferbox import settings
from waferbox.commands.cli import app, run
from waferbox.host.folders import cache_root, read_secret_key, secret_key
from waferbox.security import tokens
from waferbox.security.tokens import (
    SECRET_FILE,
    Caller,
    ClusterSecret,
    Kind,
    cluster_secret,
    command_token,
    fix_secret_file,
    known_secret,
    own_clusters_token,
    user_name,
    user_token,
    without_tokens,
)
from waferbox.settings import SettingError

HERE = "127.0.0.1:9000"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user who has no secret yet."""
    monkeypatch.delenv(settings.SECRET_FILE.name)
    monkeypatch.setenv(settings.CACHE.name, str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache"


def test_the_secret_is_made_once_and_is_its_owners_alone(cache: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for _ in range(100):
            (cache / SECRET_FILE).unlink(missing_ok=True)
            keys = set(pool.map(secret_key, [cache / SECRET_FILE] * 8))
    assert keys == {(cache / SECRET_FILE).read_bytes()}
    assert [path.name for path in cache.iterdir()] == [SECRET_FILE]
    assert (cache / SECRET_FILE).stat().st_mode & 0o777 == 0o600
    assert cluster_secret().token(Kind.NODE) == ClusterSecret(keys.pop()).token(Kind.NODE)


def test_a_secret_that_others_could_know_is_none(cache: Path) -> None:
    key = secret_key(cache / SECRET_FILE)
    (cache / SECRET_FILE).chmod(0o644)
    assert read_secret_key(cache / SECRET_FILE) is None
    assert secret_key(cache / SECRET_FILE) != key


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o666])
@pytest.mark.parametrize("named", [True, False])
def test_the_secret_of_a_cluster_that_others_could_know_is_refused(
    cache: Path, mode: int, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not replaced: the other hosts of the cluster have it too."""
    file = cache / SECRET_FILE
    key = secret_key(file)
    if named:
        monkeypatch.setenv(settings.SECRET_FILE.name, str(file))
    file.chmod(mode)
    for use in (cluster_secret, known_secret, lambda: own_clusters_token(Kind.USER, str(file))):
        with pytest.raises(SettingError, match=f"{file} has the mode 0{mode:o}, .*`chmod 600 {file}`"):
            use()
    file.chmod(0o600)
    assert cluster_secret().token(Kind.NODE) == ClusterSecret(key).token(Kind.NODE)


def test_the_secret_of_a_cluster_that_is_another_users_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    secret_key(cache / SECRET_FILE)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(
        SettingError, match=f"belongs to the user {owner}, .*`install -m 600 {cache / SECRET_FILE} COPY`"
    ):
        cluster_secret()


@pytest.mark.parametrize("kind", ["text", "device", "link"])
def test_what_is_no_secret_stays_as_it_is(
    cache: Path, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wrong WAFERBOX_SECRET_FILE, such as /dev/null: root could replace it."""
    file, text = tmp_path / "named", tmp_path / "text"
    text.write_text("of the user")
    if kind == "text":
        text.rename(file)
    elif kind == "link":
        file.symlink_to(text)
    else:
        os.mkfifo(file)
    before = file.lstat()
    monkeypatch.setenv(settings.SECRET_FILE.name, str(file))
    is_what = "no secret, or is damaged: it has 11 bytes, and a secret has 32" if kind == "text" else "no file"
    for use in (cluster_secret, known_secret, lambda: own_clusters_token(Kind.USER, str(file))):
        with pytest.raises(SettingError, match=f"{file} is {is_what}.* name another by {settings.SECRET_FILE.name}"):
            use()
    assert file.lstat() == before


def test_a_damaged_secret_of_the_cache_is_refused(cache: Path) -> None:
    """Else another one in the folder for temporary files would take its place without a word."""
    secret_key(cache / SECRET_FILE)
    os.truncate(cache / SECRET_FILE, 7)
    with pytest.raises(SettingError, match=f"{cache / SECRET_FILE} is no secret, or is damaged: it has 7 bytes"):
        cluster_secret()


def test_where_the_cache_takes_nothing_it_lies_among_temporary_files(cache: Path) -> None:
    cache.write_text("no folder")
    first = cluster_secret().token(Kind.NODE)
    assert (cache.parent / f"waferbox-{os.getuid()}" / SECRET_FILE).stat().st_mode & 0o777 == 0o600
    tokens._kept.cache_clear()  # as in another process
    assert cluster_secret().token(Kind.NODE) == first
    cache.unlink()  # there is room now: what is in use stays
    tokens._kept.cache_clear()
    assert cluster_secret().token(Kind.NODE) == first


def test_a_script_without_a_secret_shows_nothing_and_makes_none(cache: Path) -> None:
    assert user_token(HERE) == ""
    assert not cache.exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_on_this_machine_nothing_need_be_set(cache: Path, host: str) -> None:
    secret = cluster_secret()
    assert secret.caller(user_token(f"{host}:9000")) == Caller(kind=Kind.USER, names=(user_name(),))
    assert secret.caller(command_token(f"{host}:9000")) == Caller(kind=Kind.ADMIN, names=())


@pytest.mark.parametrize("address", ["192.0.2.1:9000", "no-such-host.invalid:9000"])
def test_another_machine_is_shown_what_was_given_for_it_alone(
    cache: Path, address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster_secret()
    assert user_token(address) == command_token(address) == ""
    (tmp_path / "token").write_text("from a file\n")
    monkeypatch.setenv(settings.TOKEN_FILE.name, str(tmp_path / "token"))
    assert user_token(address) == user_token(HERE) == "from a file"
    monkeypatch.setenv(settings.TOKEN.name, "given")
    assert user_token(address) == command_token(HERE) == "given"
    assert not without_tokens(os.environ).keys() & {settings.TOKEN.name, settings.TOKEN_FILE.name}


@pytest.mark.parametrize("text", [None, "ü"])
def test_a_file_without_a_token_is_named(
    cache: Path, text: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv(settings.TOKEN_FILE.name, str(file))
    with pytest.raises(SettingError, match=f"{settings.TOKEN_FILE.name} names {file}, which has no token"):
        user_token(HERE)


def test_a_token_that_cannot_be_one_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.TOKEN.name, "ü")
    with pytest.raises(SettingError, match=f"{settings.TOKEN.name} is no token: `waferbox token` prints one"):
        command_token(HERE)


def test_a_cluster_keeps_its_secret_file(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script with another folder for temporary files finds no secret there, and another may make one meanwhile."""
    temporary = tmp_path / f"waferbox-{os.getuid()}" / SECRET_FILE
    key = secret_key(temporary)
    fix_secret_file()
    assert os.environ[settings.SECRET_FILE.name] == str(temporary)
    token = cluster_secret().token(Kind.ADMIN)
    secret_key(cache / SECRET_FILE)
    assert cluster_secret().token(Kind.ADMIN) == token
    # Those who find the cluster by its record have other variables.
    monkeypatch.setenv(settings.SECRET_FILE.name, str(tmp_path / "absent"))
    assert own_clusters_token(Kind.ADMIN, str(temporary)) == ClusterSecret(key).token(Kind.ADMIN)
    assert own_clusters_token(Kind.USER, str(temporary)) == ClusterSecret(key).token(Kind.USER, user_name())
    assert not (tmp_path / "absent").exists()
    temporary.unlink()
    with pytest.raises(SettingError, match="has not the cluster's secret any more"):
        own_clusters_token(Kind.USER, str(temporary))


def test_a_secret_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(settings.SECRET_FILE.name, str(tmp_path / "file" / "key"))
    with pytest.raises(SettingError, match=f"no secret of the cluster can be made in {tmp_path}"):
        cluster_secret()


def test_commands_show_a_wrong_variable_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(settings.TOKEN_FILE.name, "/no/file")
    monkeypatch.setattr(sys, "argv", ["waferbox", "get", "jobs", "--management", HERE])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_token_says_who_and_nothing_of_it_can_be_changed() -> None:
    secret = ClusterSecret(b"key")
    token = secret.token(Kind.LEASE, "job-1", "a:b c/é", "7")
    assert token.isascii()
    assert " " not in token
    assert secret.caller(token) == Caller(kind=Kind.LEASE, names=("job-1", "a:b c/é", "7"))
    for place in range(len(token)):
        other = "0" if token[place] != "0" else "1"
        assert secret.caller(token[:place] + other + token[place + 1 :]) is None
        assert secret.caller(token[:place]) is None
    for wrong in ("", ":", "admin:", "x" * 5000, "é"):
        assert secret.caller(wrong) is None
    assert ClusterSecret(b"other").caller(token) is None


@pytest.mark.parametrize(
    ("options", "caller"),
    [
        ([], Caller(kind=Kind.ADMIN, names=())),
        (["--view"], Caller(kind=Kind.VIEWER, names=())),
        (["--user", "ada"], Caller(kind=Kind.USER, names=("ada",))),
    ],
)
def test_the_command_prints_tokens(cache: Path, options: list[str], caller: Caller) -> None:
    printed = CliRunner().invoke(app, ["token", *options])
    assert printed.exit_code == 0, printed.output
    assert cluster_secret().caller(printed.output.strip()) == caller


def test_a_user_without_a_home_has_a_cache_all_the_same(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry in its list of users."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(settings.CACHE.name)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    folder = cache.parent / f"waferbox-cache-{os.getuid()}"
    assert cache_root() == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    (cache.parent / f"waferbox-cache-{os.getuid()}").symlink_to(folder)
    with pytest.raises(PermissionError, match="belongs to another user: name another folder by WAFERBOX_CACHE"):
        cache_root()
