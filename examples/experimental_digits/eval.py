"""Evaluates a checkpoint of train.py on the held-out digits, with the API of release 1.8.

waferbox run --wafers 2 examples/experimental_digits/eval.py --checkpoint-path model_dir/checkpoint_100.mdl
"""

import argparse
from pathlib import Path

import torch
from digits import eval_dataloader_fn, make_model, prepare_digits

import cerebras_pytorch.experimental as cstorch
import cerebras_pytorch.experimental.metrics as metrics

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--backend", choices=["wse_ws", "cpu"], default="wse_ws")
parser.add_argument("--mgmt-address", help="of the cluster, host:port; by default what WAFERBOX_MANAGEMENT says")
parser.add_argument("--num-csx", type=int, default=2)
parser.add_argument("--checkpoint-path", required=True)
parser.add_argument("--model-dir", type=Path, default=Path("model_dir"))
parser.add_argument("--data", type=Path, default=Path("data/digits.pt"), help="the digits; made if there is none")
args = parser.parse_args()
prepare_digits(args.data)

cstorch.configure(model_dir=args.model_dir, mgmt_address=args.mgmt_address, num_csx=args.num_csx)

model: torch.nn.Module = make_model()
compiled_model = cstorch.compile(model, backend=args.backend)
compiled_model.eval()

loss_fn: torch.nn.Module = torch.nn.CrossEntropyLoss()

accuracy = metrics.AccuracyMetric("accuracy", compute_on_system=True)

state_dict = cstorch.load(args.checkpoint_path)
model.load_state_dict(state_dict["model"])

dataloader = cstorch.utils.data.DataLoader(
    eval_dataloader_fn,
    args.data.absolute(),
    batch_size=72,
    num_epochs=1,
)


@cstorch.compile_step
def evaluation_step(batch):
    inputs, targets = batch
    outputs = compiled_model(inputs)
    loss = loss_fn(outputs, targets)

    accuracy(
        labels=targets.clone(),
        predictions=outputs.argmax(-1).int(),
    )

    return loss


total_loss = 0
total_steps = 0


@cstorch.step_closure
def post_eval_step(loss: torch.Tensor):
    global total_loss
    global total_steps

    total_loss += loss.item()
    total_steps += 1


with torch.no_grad():
    for batch in dataloader:
        loss = evaluation_step(batch)

        post_eval_step(loss)

print(f"Loss: {total_loss / total_steps}")
print(f"Eval Accuracy: {float(accuracy)}")
