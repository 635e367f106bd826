"""Trains on handwritten digits with the API of release 1.8: configure, compile_step, a DataLoader that is iterated.

waferbox run --wafers 2 examples/experimental_digits/train.py
"""

import argparse
from pathlib import Path

import torch
from digits import make_model, prepare_digits, train_dataloader_fn

import cerebras_pytorch.experimental as cstorch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["wse_ws", "cpu"], default="wse_ws")
    parser.add_argument("--num-csx", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=200)
    parser.add_argument("--checkpoint-steps", type=int, default=100)
    parser.add_argument("--checkpoint-path", help="where to go on from")
    parser.add_argument("--model-dir", type=Path, default=Path("model_dir"))
    parser.add_argument("--data", type=Path, default=Path("data/digits.pt"), help="the digits; made if there is none")
    options = parser.parse_args()
    prepare_digits(options.data)

    # Needs to be run at the beginning before model initialization
    checkpoint_steps = options.checkpoint_steps
    cstorch.configure(
        model_dir=options.model_dir, checkpoint_steps=checkpoint_steps, num_csx=options.num_csx, seed=2023
    )

    model = make_model()
    compiled_model = cstorch.compile(model, backend=options.backend)
    loss_fn = torch.nn.CrossEntropyLoss()
    optimizer = cstorch.optim.configure_optimizer(optimizer_type="SGD", params=model.parameters(), lr=0.1, momentum=0.9)
    lr_scheduler = cstorch.optim.lr_scheduler.LinearLR(
        optimizer, initial_learning_rate=0.1, end_learning_rate=0.01, total_iters=options.num_steps
    )
    grad_scaler = None

    @cstorch.step_closure
    def save_checkpoint(step: int) -> None:
        state_dict = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if lr_scheduler:
            state_dict["lr_scheduler"] = lr_scheduler.state_dict()
        if grad_scaler:
            state_dict["grad_scaler"] = grad_scaler.state_dict()
        state_dict["global_step"] = step
        cstorch.save(state_dict, options.model_dir / f"checkpoint_{step}.mdl")

    global_step = 0

    # Load checkpoint if provided
    if options.checkpoint_path is not None:
        state_dict = cstorch.load(options.checkpoint_path)
        model.load_state_dict(state_dict["model"])
        optimizer.load_state_dict(state_dict["optimizer"])
        lr_scheduler.load_state_dict(state_dict["lr_scheduler"])
        global_step = state_dict.get("global_step", 0)

    dataloader = cstorch.utils.data.DataLoader(
        train_dataloader_fn, options.data.absolute(), batch_size=64, num_steps=options.num_steps
    )

    @cstorch.compile_step
    def training_step(batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        outputs = compiled_model(inputs)
        loss = loss_fn(outputs, targets)
        cstorch.amp.optimizer_step(loss, optimizer, grad_scaler, max_gradient_norm=1.0)
        lr_scheduler.step()
        return loss

    @cstorch.step_closure
    def post_training_step(loss: torch.Tensor) -> None:
        print("Loss: ", loss.item())

    for i, batch in enumerate(dataloader, start=global_step):
        loss = training_step(batch)
        post_training_step(loss)

        # Can only save checkpoint on predetermined steps
        if i % checkpoint_steps == 0:
            save_checkpoint(i)


if __name__ == "__main__":
    main()
