"""Evaluates a checkpoint of train.py on the held-out digits, with the API of release 1.8.

waferbox run --wafers 2 examples/experimental_digits/eval.py --checkpoint-path model_dir/checkpoint_100.mdl
"""

import argparse
from pathlib import Path

import torch
from digits import eval_dataloader_fn, make_model, prepare_digits

import cerebras_pytorch.experimental as cstorch
import cerebras_pytorch.experimental.metrics as metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["wse_ws", "cpu"], default="wse_ws")
    parser.add_argument("--num-csx", type=int, default=2)
    parser.add_argument("--checkpoint-path", required=True)
    parser.add_argument("--model-dir", type=Path, default=Path("model_dir"))
    parser.add_argument("--data", type=Path, default=Path("data/digits.pt"), help="the digits; made if there is none")
    options = parser.parse_args()
    prepare_digits(options.data)

    cstorch.configure(model_dir=options.model_dir, num_csx=options.num_csx)

    model = make_model()
    compiled_model = cstorch.compile(model, backend=options.backend)
    compiled_model.eval()
    loss_fn = torch.nn.CrossEntropyLoss()
    accuracy = metrics.AccuracyMetric("accuracy", compute_on_system=True)

    state_dict = cstorch.load(options.checkpoint_path)
    model.load_state_dict(state_dict["model"])

    dataloader = cstorch.utils.data.DataLoader(eval_dataloader_fn, options.data.absolute(), batch_size=72, num_epochs=1)

    @cstorch.compile_step
    def evaluation_step(batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        outputs = compiled_model(inputs)
        loss = loss_fn(outputs, targets)
        accuracy(labels=targets.clone(), predictions=outputs.argmax(-1).int())
        return loss

    total_loss = 0.0
    total_steps = 0

    @cstorch.step_closure
    def post_eval_step(loss: torch.Tensor) -> None:
        nonlocal total_loss, total_steps
        total_loss += loss.item()
        total_steps += 1
        print("Loss: ", loss.item())

    with torch.no_grad():
        for batch in dataloader:
            loss = evaluation_step(batch)
            post_eval_step(loss)

    print(f"Average loss: {total_loss / total_steps}")
    print(f"Eval Accuracy: {float(accuracy)}")


if __name__ == "__main__":
    main()
