"""The errors for steps that cannot be traced."""

import sys
from typing import Any

import torch
from torch._ops import OpOverload

from cstorch._internal.tracing.context import context
from cstorch._internal.tracing.provenance import user_line
from cstorch.errors import TraceError

# Functions that read a Python value by design; any other function that reads one was given a tensor for a scalar.
_SCALAR_READS = frozenset(
    {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero", "__format__"}
    | {"__str__", "__get__", "__contains__", "equal", "allclose", "float_power"}
)

# What to do where a random operation is not supported.
OTHER_DRAWS = (
    "Of random operations there are dropout, rand, randn, randint, randperm, uniform_, normal_, bernoulli, multinomial "
    "and those of torch.distributions: write it with these, or draw its numbers in the input_fn."
)


def value_read(func: OpOverload, error: type[TraceError] = TraceError) -> TraceError:
    """Returns the error for an operation that needs the value of a traced tensor."""
    function = context.functions[-1] if context.functions else None
    name = getattr(function, "__name__", "")
    is_number = func._schema.name == "aten::_local_scalar_dense"
    if is_number and name in ("__getitem__", "__setitem__"):
        return error(
            f"SyncTensor called outside of MarkStep: at {user_line()} a traced tensor without dimensions is an index, "
            f"or the bound of a slice. Its value is not known while the step is traced. Give an index a dimension: "
            f"`x[i.reshape(1)]` reads a row, and `x.index_copy_(0, i.reshape(1), row[None])` writes one. In place of a "
            f"slice `x[:n]` use all rows and a mask: `torch.arange(len(x), device=x.device) < n` with torch.where."
        )
    if is_number and torch.is_anomaly_enabled():
        return error(
            f"SyncTensor called outside of MarkStep: at {user_line()} anomaly detection reads the gradients, whose "
            f"values are not known while the step is traced. Leave torch.autograd.detect_anomaly() out of the step; "
            f"`waferbox check` names the first value that is wrong."
        )
    if is_number and name and name not in _SCALAR_READS:
        return error(
            f"SyncTensor called outside of MarkStep: at {user_line()} a traced tensor was passed to `{name}` where a "
            f"Python scalar is expected. Its value is not known while the step is traced. Use a tensor expression "
            f"instead, for example `x + a * y` for `torch.add(x, y, alpha=a)`."
        )
    if func._schema.name == "aten::bincount":
        return error(
            f"At {user_line()} the size of the counts depends on the values of a traced tensor, also with minlength, "
            f"but the step is compiled for fixed shapes before it runs. Count into a tensor of a known size: "
            f"`torch.zeros(n, device=x.device).index_add(0, x, torch.ones_like(x, dtype=torch.float32))`.\n"
            f"{_not_supported(func)}"
        )
    if torch.Tag.dynamic_output_shape in func.tags:
        return error(
            f"At {user_line()} the shape of the result depends on the values of a traced tensor, but the step is "
            f"compiled for fixed shapes before it runs. Keep the shape: write torch.where(mask, x, 0) for x[mask], "
            f"weight a loss with the mask or give it ignore_index; or select in the input_fn. Instead of a loop over "
            f"experts multiply with the chosen experts' weights as a batch, as most mixtures of transformers 5 do "
            f"here.\n{_not_supported(func)}"
        )
    if (optimizer := _optimizer_of_torch()) is not None:
        return error(
            f"At {user_line()} {optimizer.__module__}.{optimizer.__name__} decides by the value of a tensor, but the "
            f"step is traced before it runs. Use an optimizer of cstorch.optim.\n{_not_supported(func)}"
        )
    if is_number and name not in ("tolist", "equal", "allclose"):
        way_out = "and write conditions on tensors with torch.where"
    else:
        way_out = "and pass numbers that are the same in every step to the step as Python numbers, outside of the batch"
    return error(
        f"At {user_line()} the value of a traced tensor is needed, but the step is traced before it runs. Read values "
        f"in a @cstorch.step_closure, {way_out}.\n{_not_supported(func)}"
    )


def text_read() -> TraceError:
    """Returns the error for a text that needs the value of a traced tensor."""
    return TraceError(
        f"At {user_line()} a print, an f-string or str() needs the value of a traced tensor, but the step is traced "
        f"before it runs. Print it in a @cstorch.step_closure; a text for an error, which is made in every step, can "
        f"have the tensor's shape.\n{_not_supported(torch.ops.aten._local_scalar_dense.default)}"
    )


def _not_supported(func: OpOverload) -> str:
    """The line of the real system's message."""
    return f"The Cerebras backend does not yet support `{func._schema}`"


def is_of_torch(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether an optimizer is one of torch's own, some of which say torch.optim and others a module below it."""
    return kind.__module__.startswith("torch.optim")


def _optimizer_of_torch() -> type[torch.optim.Optimizer] | None:
    """Returns the class of torch.optim whose step is under way, if there is one."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        optimizer = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(optimizer, torch.optim.Optimizer) and is_of_torch(type(optimizer)):
            return type(optimizer)
    return None


def mixed_devices(func: OpOverload, device: str) -> TraceError:
    return TraceError(
        f"Expected all tensors to be on the same device, but found at least two devices, lazy and {device}! At "
        f"{user_line()} `{func._schema.name}` is given both. Move the other one with `.to(backend.torch_device)`; what "
        f"changes from step to step must come from the DataLoader."
    )


def stale(tensor: Any) -> TraceError:
    """Returns the error for a tensor of a traced step that is used where its value is not available."""
    if context.recorder is not None:
        return TraceError(
            f"at {user_line()} {tensor!r} is used in a traced step and was computed in another one, or in the body of "
            "the loop, so it has no value here. A model that keeps what its first call computes does this (`if "
            "self.mask is None: self.mask = ...`), and an argument of an earlier step. Compute it in every call; or "
            'make it in `__init__`, `self.register_buffer("mask", mask, persistent=False)`, and update it in place'
        )
    return TraceError(
        f"{tensor!r} was computed in a traced step: its value is only available inside a @cstorch.step_closure. (At "
        f"{user_line()}.) To keep a value from step to step, create the tensor before the step and update it in place."
    )


def other_layout(name: str, layout: torch.layout) -> TraceError:
    """Returns the error for an operation on sparse or nested tensors."""
    if layout is torch.jagged:
        kind = "nested"
        way_out = "Pad the parts to one length in the input_fn, and leave the padding out by a mask."
    else:
        kind, way_out = "sparse", "Keep it dense, with zeros or a mask, or select in the input_fn."
    return TraceError(
        f"At {user_line()} `{name}` needs a {kind} tensor, which the Cerebras backend does not support. {way_out}"
    )


def sparse_value() -> TraceError:
    return TraceError(
        f"At {user_line()} a sparse tensor moves to the Cerebras device, which does not support it. Keep it dense "
        f"(`tensor.to_dense()`); or keep its indices and values as two tensors, and multiply by "
        f"`torch.zeros_like(x).index_add(0, rows, values[:, None] * x[columns])`."
    )


def unsupported(func: OpOverload, reason: str) -> TraceError:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return TraceError(
            f"At {user_line()} `{func._schema.name}` is not supported by the Cerebras backend. {OTHER_DRAWS}"
        )
    return TraceError(
        f"The Cerebras backend does not yet support `{func._schema}`: {reason} (At {user_line()}.) Write it with other "
        f"torch operations, or compute it in the input_fn or in a step closure."
    )


def higher_order(name: str) -> TraceError:
    return TraceError(
        f"At {user_line()} `{name}` is given Python functions, which the Cerebras backend traces only for torch.cond, "
        f"torch.while_loop, scan and map. Call the functions yourself, on whole tensors or in a Python loop."
    )


def while_loop() -> TraceError:
    return TraceError(
        f"At {user_line()} torch.while_loop ends by the value of a traced tensor, but the step is traced before it "
        f"runs. Write a Python loop with a fixed number of turns, in which torch.where keeps the results of turns "
        f"after the end: `x = torch.where(is_running, body(x), x)`."
    )


def flex_attention() -> TraceError:
    return TraceError(
        f"At {user_line()} flex_attention is not supported by the Cerebras backend. Write it with "
        f"torch.nn.functional.scaled_dot_product_attention, and its score_mod or block_mask as attn_mask: a tensor "
        f"that is added to the scores, -inf for pairs that are left out."
    )


def exported() -> TraceError:
    return TraceError(
        f"At {user_line()} torch.export or torch.fx makes a graph of a tensor on the Cerebras device, which has no "
        f"values. Export the model before, on the CPU: outside of `with backend.device:`, of the traced step, and "
        f"before cstorch.compile."
    )


def subclass(line: str) -> TraceError:
    return TraceError(
        f"At {line} a tensor on the Cerebras device becomes one of a subclass of torch.Tensor, but it has a class of "
        f"its own. Keep the tensor as it is: hold it in an attribute of an object, and write what the subclass adds as "
        f"functions."
    )


def uninitialised() -> TraceError:
    return TraceError(
        f"At {user_line()} a parameter gets its shape in a traced step. Call the model once before, with a batch of "
        f"zeros (`model(torch.zeros(2, 6))`), and give it to cstorch.compile and to the optimizer afterwards."
    )


def complex_numbers(name: str) -> TraceError:
    return TraceError(
        f"At {user_line()} `{name}` makes complex numbers, which the Cerebras backend does not support. Compute with "
        f"real and imaginary parts as tensors of their own (a rotation by cos and sin), or in the input_fn."
    )


def own_grad_scaler() -> TraceError:
    return TraceError(
        f"At {user_line()} torch.amp.GradScaler decides by the value of a tensor whether the step counts, but the step "
        "is traced before it runs. Use cstorch.amp.GradScaler, whose decision is part of the step."
    )


def error_if_not_finite() -> TraceError:
    return TraceError(
        f"At {user_line()} error_if_nonfinite=True needs the value of a norm of gradients, but the step is traced "
        "before it runs. Leave error_if_nonfinite out, and check the norm that is returned in a @cstorch.step_closure."
    )


def packed_sequence() -> TraceError:
    return TraceError(
        f"At {user_line()} sequences are packed: the shape of the result depends on their lengths, but the step is "
        f"compiled for fixed shapes before it runs. Give the LSTM or GRU the padded sequences, in which padding comes "
        f"after all steps that count, and take what is at the last of them: "
        f"`output[torch.arange(len(lengths)), lengths - 1]` with batch_first=True; leave padding out of a loss with "
        f"ignore_index or a mask."
    )


def explicit_alias(func: OpOverload, tensor: Any) -> TraceError:
    return TraceError(
        f"At {user_line()} `{func._schema.name}` makes an explicit alias of a weight, of shape {tuple(tensor.shape)}, "
        f"that is initialised lazily. With backend.device.config.lazy_initialization = True operations that alias one "
        f"(`x @ weight.T`, `weight.transpose_(0, 1)`) are not supported in the forward pass. Let an operation use the "
        f"weight as it is, such as F.linear(x, weight); or set lazy_initialization to False, or leave the line out: "
        f"by default initialisation is lazy without this limitation."
    )


def own_generator(func: OpOverload) -> TraceError:
    return TraceError(
        f"At {user_line()} `{func._schema.name}` is given a generator. In a traced step random numbers come from the "
        f"seed, the step and the operation: leave `generator` out, and set the seed with torch.manual_seed before."
    )


def drawn_on_host(line: str) -> TraceError:
    return TraceError(
        f"At {user_line()} a random tensor that was drawn on the CPU in the traced step, at {line}, enters the step. "
        f"The step is traced once, so this one draw would be that of every step. Draw it on the device, where each "
        f"step draws again: `torch.randn(n, device=x.device)`, `torch.randint(0, T, (n,), device=x.device)`; or "
        f"draw it in the input_fn, as part of the batch. If all steps are to have the same, draw it before the step, "
        f"as a buffer of the model."
    )


def created_in_step(tensor: Any, where: str, holder: str) -> TraceError:
    return TraceError(
        f"{tensor!r}, created at {where}, is kept {holder} after the step. It would be created anew in every step, so "
        f"nothing would be carried from one step to the next. Create state before the step: in `__init__` of a module "
        f"(a buffer), or under `with backend.device:`. To keep a result, return it from the step or pass it to a step "
        f"closure."
    )


def created_by_optimizer(tensor: Any, where: str, name: str, kind: type[torch.optim.Optimizer]) -> TraceError:
    created = (
        f"{tensor!r}, created at {where}, is kept as {name!r} in the state of {kind.__name__} after the step. It would "
        f"be created anew in every step, so nothing would be carried from one step to the next. "
    )
    if is_of_torch(kind):
        return TraceError(
            f"{created}Use cstorch.optim.{kind.__name__}, which creates its state before the first step, or another "
            f"optimizer of cstorch.optim."
        )
    return TraceError(
        f"{created}Derive {kind.__name__} from cstorch.optim.Optimizer, and create the state in its `preinitialize`:\n"
        f"    def preinitialize(self):\n"
        f"        for group in self.param_groups:\n"
        f"            for p in group['params']:\n"
        f"                self.state[p][{name!r}] = cstorch.zeros_like(p)\n"
        f"What counts steps must be a tensor that `step` updates in place (`self.increment_global_step(p)`), and no "
        f"number."
    )


def optimizer_elsewhere(optimizer: torch.optim.Optimizer) -> TraceError:
    """Returns the error for an optimizer in a step that has no parameter on the device."""
    return TraceError(
        f"at {user_line()} the step steps {type(optimizer).__name__}, none of whose parameters is on the device: make "
        "it of the parameters of the model that cstorch.compile got; another model is trained outside of the step"
    )


def replaced_in_step(description: str, where: str) -> TraceError:
    return TraceError(
        f"{description}, first used at {where}, existed before the step and was replaced by another tensor in it, but "
        f"is not registered as state: the new value would be lost after each step. Register it as a buffer of a module "
        f"or as state of an optimizer, or update it in place (`total.add_(x)`, not `total = total + x`)."
    )


def shared_state_replaced(name: str, other: str) -> TraceError:
    return TraceError(
        f"the states {name!r} and {other!r} share one storage, and have different values after the step, since one or "
        f"both were replaced. Give each a tensor of its own before the step: `register_buffer(name, tensor.clone())`."
    )


def changed_state_read(name: str, refusal: TraceError) -> TraceError:
    """Returns the error for a read of a state that the step changes; `refusal` is the error for an unknown value."""
    return type(refusal)(
        f"{refusal}\nWhat was read depends on the state {name!r}, which the step changes: it is right in the first "
        f"step only. Compute with the tensor itself (`torch.where(count < 5, a, b)`, and not `if count < 5`)."
    )


def shape_changed(tensor: Any, value: Any) -> TraceError:
    return TraceError(
        f"At {user_line()} `p.data = v` gives a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype} the "
        f"shape {tuple(value.shape)} and type {value.dtype}. In a traced step tensors keep shape and type: convert the "
        f"model (`model.double()`, `model.to(dtype)`) before the loop, and values in the step with `x.to(dtype)`."
    )
