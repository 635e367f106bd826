"""Dynamo takes half a second to import. The client does not import it; who does finds torch as it ever was."""

import subprocess
import sys
import textwrap


def output_of(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_meta_tensors_do_not_import_it() -> None:
    script = """
        import sys
        import torch
        import cstorch
        x = torch.empty(3, 4, device="meta")
        for function in (torch.add, torch.div, torch.sub, torch.pow, torch.maximum):
            assert function(x, x).shape == (3, 4)
        assert (1 - x / 7).shape == (3, 4)
        for function in (torch.sigmoid, torch.nn.functional.gelu, torch.tanh, torch.exp, torch.sqrt):
            assert function(x).shape == (3, 4)
        assert "torch._dynamo" not in sys.modules
    """
    output_of(script)


def test_from_its_import_on_torch_has_the_functions_as_ever() -> None:
    script = """
        import torch
        import cstorch
        from torch._decomp import meta_table
        from cstorch._internal.tracing.device.registration import _wrapped, _wrappers
        x = torch.empty(3, 4, device="meta")
        assert torch.div(x, 2).shape == (3, 4)
        marked = [_wrapped(wrapper) for wrapper in _wrappers()]
        assert len(marked) > 100
        import torch._dynamo
        for wrapper in _wrappers():
            try:
                wrapper()  # no arguments: it fails, but is looked at first
            except Exception:
                pass
        used = [function.__dict__["__dynamo_disable"].__code__.co_filename for function in marked]
        assert [file for file in used if "late_dynamo" in file] == []
        assert torch.div(x, 2).shape == (3, 4)
        compiled = torch.compile(lambda a: torch.sigmoid(a / 3), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(torch.ones(2)), torch.sigmoid(torch.ones(2) / 3))
    """
    output_of(script)
