"""Trains on handwritten digits with the API of release 1.8: configure, compile_step, a DataLoader that is iterated.

waferbox run --wafers 2 examples/experimental_digits/train.py
"""

import argparse
from pathlib import Path

import torch
from digits import make_model, prepare_digits, train_dataloader_fn

import cerebras_pytorch.experimental as cstorch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--backend", choices=["wse_ws", "cpu"], default="wse_ws")
parser.add_argument("--mgmt-address", help="of the cluster, host:port; by default what WAFERBOX_MANAGEMENT says")
parser.add_argument("--num-csx", type=int, default=2)
parser.add_argument("--num-steps", type=int, default=200)
parser.add_argument("--checkpoint-steps", type=int, default=100)
parser.add_argument("--checkpoint-path", help="where to go on from")
parser.add_argument("--loss-scale", type=float, default=0.0, help="of the gradients; 0: none")
parser.add_argument("--model-dir", type=Path, default=Path("model_dir"))
parser.add_argument("--data", type=Path, default=Path("data/digits.pt"), help="the digits; made if there is none")
args = parser.parse_args()
prepare_digits(args.data)

# Needs to be run at the beginning before model initialization
checkpoint_steps = args.checkpoint_steps
cstorch.configure(
    model_dir=args.model_dir,
    checkpoint_steps=checkpoint_steps,
    mgmt_address=args.mgmt_address,
    num_csx=args.num_csx,
    seed=2023,
)

# user defined model
model: torch.nn.Module = make_model()
compiled_model = cstorch.compile(model, backend=args.backend)

loss_fn: torch.nn.Module = torch.nn.CrossEntropyLoss()

optimizer: cstorch.optim.Optimizer = cstorch.optim.configure_optimizer(
    optimizer_type="SGD",
    params=model.parameters(),
    lr=0.1,
    momentum=0.9,
)
lr_scheduler: cstorch.optim.lr_scheduler.LRScheduler = cstorch.optim.configure_lr_scheduler(
    optimizer,
    learning_rate=[
        {"scheduler": "Linear", "initial_learning_rate": 0.02, "end_learning_rate": 0.1, "total_iters": 10},
        {"scheduler": "CosineDecay", "initial_learning_rate": 0.1, "end_learning_rate": 0.01, "total_iters": 190},
    ],
)

grad_scaler = None
if args.loss_scale != 0.0:
    grad_scaler = cstorch.amp.GradScaler(loss_scale=args.loss_scale)


@cstorch.step_closure
def save_checkpoint(step):
    checkpoint_file = args.model_dir / f"checkpoint_{step}.mdl"

    state_dict = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    if lr_scheduler:
        state_dict["lr_scheduler"] = lr_scheduler.state_dict()
    if grad_scaler:
        state_dict["grad_scaler"] = grad_scaler.state_dict()

    state_dict["global_step"] = step

    cstorch.save(state_dict, checkpoint_file)


global_step = 0

# Load checkpoint if provided
if args.checkpoint_path is not None:
    state_dict = cstorch.load(args.checkpoint_path)

    model.load_state_dict(state_dict["model"])
    optimizer.load_state_dict(state_dict["optimizer"])
    if lr_scheduler:
        lr_scheduler.load_state_dict(state_dict["lr_scheduler"])
    if grad_scaler:
        grad_scaler.load_state_dict(state_dict["grad_scaler"])

    global_step = state_dict.get("global_step", 0)

dataloader = cstorch.utils.data.DataLoader(
    train_dataloader_fn,
    args.data.absolute(),
    batch_size=64,
    num_steps=args.num_steps,
)


@cstorch.compile_step
def training_step(batch):
    inputs, targets = batch
    outputs = compiled_model(inputs)
    loss = loss_fn(outputs, targets)

    cstorch.amp.optimizer_step(loss, optimizer, grad_scaler, max_gradient_norm=1.0)

    if lr_scheduler:
        lr_scheduler.step()

    return loss


@cstorch.step_closure
def post_training_step(loss: torch.Tensor):
    print("Loss: ", loss.item())


for i, batch in enumerate(dataloader):
    loss = training_step(batch)

    post_training_step(loss)

    # Can only save checkpoint on predetermined steps
    if i % checkpoint_steps == 0:
        save_checkpoint(global_step + i)
