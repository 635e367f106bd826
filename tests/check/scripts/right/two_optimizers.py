"""A generator and its critic, each with an optimizer of its own."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.1), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.1), nn.Linear(16, 1))

    def forward(self, noise, real):
        made = self.generator(noise)
        return self.critic(made), self.critic(made.detach()), self.critic(real)


torch.manual_seed(8)
backend = cstorch.backend("CSX")
with backend.device:
    model = Pair()
compiled = cstorch.compile(model, backend)
for_generator = cstorch.optim.Adam(model.generator.parameters(), lr=0.01, betas=(0.5, 0.999))
for_critic = cstorch.optim.Adam(model.critic.parameters(), lr=0.01, betas=(0.5, 0.999))


def input_fn():
    return DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 8)), 16, drop_last=True)


@cstorch.trace
def training_step(batch):
    noise, real = batch
    of_made, of_detached, of_real = compiled(noise, real)
    generator_loss = F.binary_cross_entropy_with_logits(of_made, torch.ones_like(of_made))
    critic_loss = F.binary_cross_entropy_with_logits(of_real, torch.ones_like(of_real))
    critic_loss = critic_loss + F.binary_cross_entropy_with_logits(of_detached, torch.zeros_like(of_detached))
    for_generator.zero_grad()
    generator_loss.backward()
    for_critic.zero_grad()
    critic_loss.backward()
    for_generator.step()
    for_critic.step()
    return generator_loss, critic_loss


for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=5):
    training_step(batch)
