"""Two networks against each other: a generator learns to draw points that lie like eight clouds on a ring.

python examples/gan.py                   # seconds on a CPU: kill it, start it again, and it goes on
python examples/gan.py --width 512 --batch 1024 --steps 20000
"""

import argparse
import math

import torch
from torch import nn
from torch.nn.functional import softplus

import everystep

NOISE = 8


def network(inputs, width, outputs):
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


def real_points(count, device):
    angles = torch.randint(8, (count,), device=device) * (math.pi / 4)
    clouds = torch.stack([angles.cos(), angles.sin()], dim=1)
    return clouds + 0.05 * torch.randn(count, 2, device=device)


def read_options():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--critic-turns", type=int, default=2, help="of the critic, in each step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--run", default="runs/gan", help="where checkpoints go")
    return parser.parse_args()


def main():
    options = read_options()
    torch.manual_seed(7)
    generator = network(NOISE, options.width, 2).to(options.device)
    critic = network(2, options.width, 1).to(options.device)
    models = {"generator": generator, "critic": critic}
    # a dict of optimizers: each is recorded in the order in which it steps, as often as it does
    optimizers = {
        name: torch.optim.Adam(model.parameters(), lr=options.lr, betas=(0.5, 0.99))
        for name, model in models.items()
    }

    def drawn():  # from torch's own random state, which comes back after a crash with all the rest
        return generator(torch.randn(options.batch, NOISE, device=options.device))

    with everystep.attach(models, optimizers, run=options.run) as run:
        for step in run.steps(options.steps):
            for _ in range(options.critic_turns):
                real = critic(real_points(options.batch, options.device))
                critic_loss = softplus(-real).mean() + softplus(critic(drawn().detach())).mean()
                optimizers["critic"].zero_grad()
                critic_loss.backward()
                optimizers["critic"].step()

            points = drawn()
            generator_loss = softplus(-critic(points)).mean()
            optimizers["generator"].zero_grad()
            generator_loss.backward()  # reaches the critic too: its next turn drops those gradients
            optimizers["generator"].step()

            if (step + 1) % 50 == 0:
                off = (points.detach().norm(dim=1) - 1).abs().mean()
                print(
                    f"step {step + 1}: critic {critic_loss.item():.4f}, "
                    f"generator {generator_loss.item():.4f}, {off.item():.4f} off the ring"
                )


if __name__ == "__main__":
    main()
