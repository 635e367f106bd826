"""Verification of modules. A module from the wire is used only after it."""

from collections.abc import Sequence

from xdsl.dialects.builtin import DictionaryAttr, IntegerAttr, ModuleOp, StringAttr
from xdsl.ir import Operation, SSAValue

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.attributes import DenseAttr, SplatAttr
from waferbox.cirh.dialect.operations import CirhOperation, Const, Func, body_ops, func_of, return_of
from waferbox.cirh.modules.builder import ALIAS, INPUT_NAME, OUTPUT_NAME, STATE_NAME, with_source
from waferbox.cirh.table.lookup import result_types, site_of, spec


def verify(module: ModuleOp) -> None:
    """Raises CirhError, with operation and source line, unless the module is consistent.

    Values are defined before their use. Operands and attributes agree with the table. Every result type is equal to the
    type that is inferred again. Names and aliases of arguments and results are unique, and aliases have equal types.
    """
    function = func_of(module)
    defined: set[SSAValue] = set(function.block.args)
    for operation in body_ops(module):
        try:
            _verify_operation(operation, defined)
        except CirhError as error:
            raise with_source(error, operation.location) from None
        defined.update(operation.results)
    results = list(return_of(module).operands)
    if not defined.issuperset(results):
        raise CirhError("the function returns a value that it does not define")
    _verify_signature(function, results)


def _verify_operation(operation: Operation, defined: set[SSAValue]) -> None:
    if not isinstance(operation, CirhOperation):
        raise CirhError(f"{operation.name} is not an operation of CIRH")
    if not defined.issuperset(operation.operands):
        raise CirhError(f"{operation.name} reads a value before it is defined")
    if isinstance(operation, Const):
        value = operation.attributes.get("value")
        if not isinstance(value, (SplatAttr, DenseAttr)) or [value.type] != [r.type for r in operation.results]:
            raise CirhError("cirh.Const: its value and its type differ")
        return
    inferred = result_types(site_of(operation))
    declared = [result.type for result in operation.results]
    if inferred != declared:
        made = ", ".join(str(type) for type in inferred)
        given = ", ".join(str(type) for type in declared)
        raise CirhError(f"{operation.name} makes {made}, but the module says {given}")
    row = spec(operation.name)
    for index in row.unread:
        if operation.results[index].uses:
            raise CirhError(f"{operation.name}: its result {row.result_names[index]} is read, which is not executed")


def _name(attributes: DictionaryAttr, key: str) -> str | None:
    value = attributes.data.get(key)
    if value is None:
        return None
    if not isinstance(value, StringAttr):
        raise CirhError(f"{key} is not a string")
    return value.data


def _verify_signature(function: Func, results: Sequence[SSAValue]) -> None:
    function_type = function.function_type
    if list(function_type.inputs.data) != [argument.type for argument in function.block.args]:
        raise CirhError("the function's type is not that of its arguments")
    if list(function_type.outputs.data) != [result.type for result in results]:
        raise CirhError("the function's type is not that of its results")
    if len(function.argument_attributes) != len(function.block.args) or len(function.result_attributes) != len(results):
        raise CirhError("attributes of arguments or results are missing")
    names: set[tuple[str, str]] = set()

    def unique(key: str, name: str | None) -> None:
        if name is not None:
            if (key, name) in names:
                raise CirhError(f"{key} {name!r} is there twice")
            names.add((key, name))

    replaced: set[int] = set()
    for argument, attributes in zip(function.block.args, function.argument_attributes, strict=True):
        state = _name(attributes, STATE_NAME)
        unique(STATE_NAME, state)
        unique(INPUT_NAME, _name(attributes, INPUT_NAME))
        alias = attributes.data.get(ALIAS)
        if alias is None:
            continue
        if not isinstance(alias, IntegerAttr) or not 0 <= alias.value.data < len(results) or state is None:
            raise CirhError(f"{ALIAS} of {state or 'an argument without a name'} is not the number of a result")
        index = alias.value.data
        if index in replaced:
            raise CirhError(f"two states are replaced by result {index}")
        if results[index].type != argument.type:
            raise CirhError(f"state {state!r} is {argument.type}, but is replaced by {results[index].type}")
        replaced.add(index)
    for index, attributes in enumerate(function.result_attributes):
        output = _name(attributes, OUTPUT_NAME)
        unique(OUTPUT_NAME, output)
        if output is not None and index in replaced:
            raise CirhError(f"result {index} is both output {output!r} and a state's next value")
