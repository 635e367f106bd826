"""Settings of the real system: any field can be set, and they are handed over, copied, written and read."""

import copy
from pathlib import Path

import cloudpickle
import pytest

import cstorch
from cerebras_appliance.pb.client.common_config_pb2 import DebugArgs
from cerebras_appliance.pb.stack.full_pb2 import FullConfig
from cerebras_appliance.run_utils import update_debug_args_with_autogen_policy, update_debug_args_with_mem_limits
from cerebras_appliance.utils.debug_args import get_debug_args, update_debug_args_from_keys, write_debug_args
from cerebras_appliance.utils.ini import set_default_ini, set_ini
from cstorch.backends.open_settings import OpenSettings
from cstorch.errors import ConfigurationError


def filled() -> DebugArgs:
    settings = DebugArgs(debug_ini=DebugArgs.DebugINI(frozen_content='a: "b"\nc'))
    settings.debug_usr.worker_resource.memory_bytes = 5 << 30
    settings.debug_mgr.labels["k8s.io/name"] = "value"
    settings.debug_mgr.task_spec_hints["worker"].container_image = "image"
    settings.debug_mgr.clean_pod_policy = DebugArgs.DebugMGR.CleanPodPolicy.NONE
    settings.hosts.append("first")
    settings.hosts.extend(["second"])
    settings.parts.add(name="x").size = 1.5
    settings.parts.add(name="y")
    return settings


def test_any_field_is_set_and_read() -> None:
    settings = filled()
    assert settings.debug_ini.frozen_content == 'a: "b"\nc'
    assert settings.debug_mgr.labels["k8s.io/name"] == "value"
    assert "k8s.io/name" in settings.debug_mgr.labels
    assert settings.debug_mgr.labels.get("other", 3) == 3
    assert list(settings.hosts) == ["first", "second"]
    assert settings.parts[0].size == 1.5
    assert len(settings.parts) == 2


def test_what_nobody_set_is_nothing() -> None:
    settings = DebugArgs()
    assert not settings.debug_ini.frozen_content
    assert not settings.HasField("debug_ini")
    settings.debug_ini.frozen_content += "more"
    assert settings.debug_ini.frozen_content == "more"
    settings.ClearField("debug_ini")
    assert settings == DebugArgs()


def test_settings_are_copied_and_pickled() -> None:
    settings = filled()
    for other in (copy.copy(settings), copy.deepcopy(settings), cloudpickle.loads(cloudpickle.dumps(settings))):
        assert other == settings
        assert type(other) is DebugArgs
    deep = copy.deepcopy(settings)
    deep.debug_mgr.labels["more"] = 1
    assert "more" not in settings.debug_mgr.labels


def test_settings_are_merged() -> None:
    settings = DebugArgs(a=1, b={"c": 2, "d": 3})
    settings.MergeFrom(DebugArgs(b={"d": 4}, e=5))
    assert settings == DebugArgs(a=1, b={"c": 2, "d": 4}, e=5)
    settings.CopyFrom(DebugArgs(f=6))
    assert settings == DebugArgs(f=6)
    with pytest.raises(TypeError, match="from settings"):
        settings.MergeFrom({"a": 1})  # type: ignore[arg-type]


def test_a_merged_part_is_no_part_of_the_other() -> None:
    other = DebugArgs(a={"b": 1})
    settings = DebugArgs()
    settings.MergeFrom(other)
    settings.a.b = 2
    assert other.a.b == 1


def test_a_file_of_settings_is_written_and_read(tmp_path: Path) -> None:
    file = tmp_path / "debug_args.proto"
    settings = filled()
    set_ini(settings, ws_flag=True, ws_count=3, ws_share=0.5, ws_name="n")
    write_debug_args(settings, file)
    assert get_debug_args(str(file)) == settings
    assert get_debug_args(settings) is settings
    assert get_debug_args(None) == DebugArgs()


def test_a_file_as_people_write_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "debug_args.proto"
    file.write_text(
        """# a comment
        debug_mgr { labels { key: 'a' value: "b" } clean_pod_policy: NONE }
        ini: < bools { key: "x" value: false }, ints { key: "y" value: -2 } >
        numbers: [1, 2.5, 0x10]; empty {}
        """
    )
    settings = get_debug_args(file)
    assert settings.debug_mgr.labels["a"] == "b"
    assert settings.debug_mgr.clean_pod_policy == "NONE"
    assert settings.ini.bools["x"] is False
    assert settings.ini.ints["y"] == -2
    assert list(settings.numbers) == [1, 2.5, 16]


@pytest.mark.parametrize("text", ["a {", "a: [1", "a: ?", "{}", "a"])
def test_a_file_of_another_form_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "debug_args.proto"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match="a file of debug_args"):
        get_debug_args(file)


def test_settings_by_dotted_names() -> None:
    settings = DebugArgs()
    update_debug_args_from_keys(settings, {"debug_usr.a.b": 1, "debug_usr": {"a": {"c": 2}}, "d": True})
    assert settings.debug_usr.a.b == 1
    assert settings.debug_usr.a.c == 2
    assert settings.d is True


def test_default_settings_of_the_compiler_leave_what_is_set() -> None:
    settings = DebugArgs()
    set_ini(settings, a=True, b=1)
    set_default_ini(settings, a=False, c="x")
    assert settings.ini.bools["a"] is True
    assert settings.ini.strings["c"] == "x"
    assert settings.ini.ints["b"] == 1
    with pytest.raises(TypeError, match="'d'"):
        set_ini(settings, d=None)  # type: ignore[arg-type]


def test_limits_of_memory_and_the_policy_of_old_scripts() -> None:
    settings = DebugArgs()
    update_debug_args_with_mem_limits(settings, {"wgt_memory_gi": 2, "act_memory_gi": None})
    update_debug_args_with_mem_limits(settings, None)
    update_debug_args_with_autogen_policy(settings, None)
    update_debug_args_with_autogen_policy(settings, "disabled")
    assert settings.debug_usr.weight_resource.memory_bytes == 2 << 30
    assert not settings.debug_usr.HasField("activation_resource")
    assert settings.debug_crd.autogen_policy == "disabled"


def test_the_flag_takes_settings() -> None:
    flags = cstorch.backends.csx.debug
    with flags(debug_args={"a": {"b": 1}}):
        flags.debug_args.MergeFrom(DebugArgs(a={"c": 2}))
        assert flags.debug_args == OpenSettings(a={"b": 1, "c": 2})
    assert isinstance(flags.debug_args, OpenSettings)


def test_all_settings_of_the_old_compiler() -> None:
    config = FullConfig()
    config.matching.kernel.some_flag = True
    assert config.matching.kernel.some_flag
    assert str(config) == "matching {\n  kernel {\n    some_flag: true\n  }\n}\n"
