"""The Helm chart of a cluster: the manifests of `waferbox kubernetes`, with values in the place of its options.

The manifests are made with and without each option that adds lines to them, and the texts are merged: a line that only
some have stands in an `if`. So a rendered chart is exactly a cluster's manifests, and no template repeats them by hand.
"""

import difflib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

import waferbox
from waferbox.kubernetes.compose_file import FOLLOWERS, RoleSettings
from waferbox.kubernetes.manifests import ClusterOptions, Manifest, as_text, cluster_manifests
from waferbox.roles import BY_NAME, LEASED, WAFER

_FILES: Final = Path(__file__).with_name("chart_files")  # the parts of a chart that no manifest has
_SHARED: Final = "cluster"  # the template of the objects that belong to no role

# An expression of a template, between these marks, passes through YAML as a plain word.
_MARKS: Final = ("<", ">")
_EXPRESSION: Final = ("{{ ", " }}")

_NAME: Final = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_SIZE: Final = {"type": "string", "pattern": "^[1-9][0-9]*(Ki|Mi|Gi|Ti)?$"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Value:
    """A value of the chart: its default, its JSON schema, and its meaning."""

    default: Any
    schema: Mapping[str, Any]
    meaning: str


def write_chart(folder: Path, roles: Mapping[str, RoleSettings], options: ClusterOptions) -> None:
    """Writes the chart of a cluster into a folder, whose name Helm wants to be that of the chart, "waferbox".

    Args:
        folder: made if absent; other files in it stay.
        roles: by name; their numbers and memory are the defaults of the values.
        options: the defaults of the other values. The namespace is that of a release, and not the options'.

    Raises:
        OSError: a file cannot be written.
    """
    for name, text in chart_files(roles, options).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def chart_files(roles: Mapping[str, RoleSettings], options: ClusterOptions) -> dict[str, str]:
    """Returns the text of each file of a chart by its path; the arguments are those of `write_chart`."""
    values = _values(roles, options)
    copied = (path for path in sorted(_FILES.rglob("*")) if path.is_file())
    return {
        "Chart.yaml": yaml.safe_dump(_description(), sort_keys=False),
        "values.yaml": _values_text(values),
        "values.schema.json": json.dumps(_schema(values), indent=2) + "\n",
        **{str(path.relative_to(_FILES)): path.read_text() for path in copied},
        **{f"templates/{name}.yaml": text for name, text in _templates(roles).items()},
    }


# --- Values -----------------------------------------------------------------------------------------------------------


def _values(roles: Mapping[str, RoleSettings], options: ClusterOptions) -> dict[str, _Value | dict[str, _Value]]:
    """The values by name, some of them in groups."""
    name_or_nothing = {"type": "string", "pattern": f"^({_NAME})?$"}
    made: dict[str, _Value | dict[str, _Value]] = {}
    for role in LEASED:
        if role.name in roles:
            made[role.count_option] = _number(roles[role.name], role.noun)
    made["images"] = _Value(
        default=options.images,
        schema={"type": "string", "pattern": "^([a-z0-9][-a-z0-9._:/]*/)?$"},
        meaning='prefix of the images, "registry.example/team/"',
    )
    made["tag"] = _Value(
        default=options.tag,
        schema={"type": "string", "pattern": "^[A-Za-z0-9_][-A-Za-z0-9._]{0,127}$"},
        meaning="tag of the images",
    )
    made["memory"] = {
        role.name: _Value(default=role.memory, schema=_SIZE, meaning=f"of one {BY_NAME[role.name].noun}")
        for role in roles.values()
    }
    made["storage"] = {
        "size": _Value(default=options.storage, schema=_SIZE, meaning="of each volume, for caches and recovery points"),
        "class": _Value(default=options.storage_class, schema=name_or_nothing, meaning="empty: the default class"),
    }
    made["data"] = {
        "claim": _Value(
            default=options.data_claim,
            schema=name_or_nothing,
            meaning="claim of a volume that input functions read; empty: none",
        ),
        "folder": _Value(
            default=options.data_folder or "/data",
            schema={"type": "string", "pattern": "^/[-A-Za-z0-9._/]+$"},
            meaning="path of this volume in scripts and workers",
        ),
    }
    boolean = {"type": "boolean"}
    made["tls"] = _Value(default=options.tls, schema=boolean, meaning='encrypt, with the secret "waferbox-tls"')
    made["createSecret"] = _Value(
        default=True,
        schema=boolean,
        meaning='make the secret "waferbox-secret" if it is absent; false where charts are rendered without a cluster',
    )
    return made


def _number(role: RoleSettings, noun: str) -> _Value:
    """The value for the number of a role's processes."""
    schema: dict[str, Any] = {"type": "integer", "minimum": 0}
    meaning = f"number of {noun}s"
    if role.name not in FOLLOWERS:
        return _Value(default=role.count, schema=schema, meaning=meaning)
    return _Value(
        default=None if role.follows_wafers else role.count,
        schema={**schema, "type": ["integer", "null"]},
        meaning=f"{meaning}; null: as many as wafers, and at least {role.count}",
    )


def _values_text(values: Mapping[str, _Value | Mapping[str, _Value]]) -> str:
    lines = []
    for name, value in values.items():
        if isinstance(value, _Value):
            lines.append(_value_line(name, value))
        else:
            lines += [f"{name}:", *(f"  {_value_line(*each)}" for each in value.items())]
    return "\n".join(lines) + "\n"


def _value_line(name: str, value: _Value) -> str:
    return f"{name}: {json.dumps(value.default)} # {value.meaning}"


def _schema(values: Mapping[str, _Value | Mapping[str, _Value]]) -> dict[str, Any]:
    """The schema of an object with these values and no others."""
    properties = {
        name: {"description": value.meaning, **value.schema} if isinstance(value, _Value) else _schema(value)
        for name, value in values.items()
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _description() -> Mapping[str, str]:
    return {
        "apiVersion": "v2",
        "name": "waferbox",
        "description": "A wafer-scale cluster in a box: the Cerebras PyTorch API on a cluster of ordinary processes",
        "type": "application",
        "version": waferbox.__version__,
        "appVersion": waferbox.__version__,
        "kubeVersion": ">=1.27.0-0",  # the first with gRPC probes
    }


# --- Templates --------------------------------------------------------------------------------------------------------


def _expression(text: str) -> str:
    """An expression of a template, as a part of a manifest."""
    return text.join(_MARKS)


def _quoted(value: str) -> str:
    """The value as a string of its own, which YAML takes for nothing else, whatever is in it."""
    return _expression(f".Values.{value} | quote")


def _templates(roles: Mapping[str, RoleSettings]) -> dict[str, str]:
    """The text of each template by its name: one for each role, and one for the objects of the whole cluster."""
    with_values = {name: replace(role, memory=_quoted(f"memory.{name}")) for name, role in roles.items()}
    variants: dict[tuple[bool, ...], dict[str, list[Manifest]]] = {}
    for chosen in itertools.product((True, False), repeat=len(_CONDITIONS)):
        tls, has_class, has_data = chosen
        options = ClusterOptions(
            namespace=_expression(".Release.Namespace | quote"),
            images=_expression(".Values.images"),
            tag=_expression(".Values.tag"),
            tls=tls,
            storage=_quoted("storage.size"),
            storage_class=_quoted("storage.class") if has_class else "",
            data_claim=_quoted("data.claim") if has_data else "",
            data_folder=_quoted("data.folder"),
        )
        variants[chosen] = _by_template(cluster_manifests(with_values, options), roles)
    names = list(dict.fromkeys(itertools.chain.from_iterable(variants.values())))
    texts = {name: {chosen: as_text(manifests[name]) for chosen, manifests in variants.items()} for name in names}
    return {name: _as_template(_merged(_CONDITIONS, (), texts[name])) for name in names}


# The settings that add lines to the manifests, as conditions of templates.
_CONDITIONS: Final = (".Values.tls", ".Values.storage.class", ".Values.data.claim")


def _by_template(manifests: Sequence[Manifest], roles: Mapping[str, RoleSettings]) -> dict[str, list[Manifest]]:
    """The objects by the name of their template, with expressions for the numbers of processes."""
    made: dict[str, list[Manifest]] = {}
    for manifest in manifests:
        if manifest["kind"] == "Namespace":  # which Helm makes
            continue
        name = str(manifest["metadata"]["name"]).removesuffix("-cache")
        if "replicas" in manifest.get("spec", {}) and (option := BY_NAME[name].count_option):
            manifest["spec"]["replicas"] = _expression(_count(roles[name], option))
        made.setdefault(name if name in roles else _SHARED, []).append(manifest)
    return made


def _count(role: RoleSettings, option: str) -> str:
    """The number of a role's processes as an expression of a template; `option` is the name of its value."""
    given = f".Values.{option}"
    if role.name not in FOLLOWERS:
        return given
    default = f"max {role.count} (int .Values.{WAFER.count_option})"
    return f'ternary ({default}) (int {given}) (kindIs "invalid" {given})'


def _merged(conditions: Sequence[str], chosen: tuple[bool, ...], texts: Mapping[tuple[bool, ...], str]) -> list[str]:
    """The parts of a template: lines, and whole blocks, which are not divided again.

    Args:
        conditions: those that are not decided yet.
        chosen: the decisions on the others.
        texts: the text for each decision on all conditions.
    """
    if not conditions:
        return texts[chosen].splitlines()
    condition, *others = conditions
    positive, negative = (_merged(others, (*chosen, decision), texts) for decision in (True, False))
    merged = []
    matcher = difflib.SequenceMatcher(a=positive, b=negative, autojunk=False)
    for kind, start, end, other_start, other_end in matcher.get_opcodes():
        if kind == "equal":
            merged += positive[start:end]
        else:
            merged.append(_block(condition, positive[start:end], negative[other_start:other_end]))
    return merged


def _block(condition: str, positive: Sequence[str], negative: Sequence[str]) -> str:
    """The lines for a condition that holds, and for one that does not; one of them may be none."""
    if not positive:
        return "\n".join([f"{{{{- if not {condition} }}}}", *negative, "{{- end }}"])
    otherwise = ["{{- else }}", *negative] if negative else []
    return "\n".join([f"{{{{- if {condition} }}}}", *positive, *otherwise, "{{- end }}"])


def _as_template(parts: Sequence[str]) -> str:
    text = "\n".join(parts) + "\n"
    for mark, written in zip(_MARKS, _EXPRESSION, strict=True):
        text = text.replace(mark, written)
    return text
