"""A GPT that learns to write, character by character, in the way of nanoGPT.

python examples/nanogpt.py               # seconds on a CPU: kill it, start it again, and it goes on
python examples/nanogpt.py --data input.txt --width 384 --layers 6 --heads 6 --context 256 --steps 5000
"""

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics  # text that every Python carries, if no --data is given

import torch
from torch import nn
from torch.utils.data import DataLoader

import everystep


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(size.dropout)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.narrow(nn.functional.gelu(self.wide(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, letters, size):
        super().__init__()
        self.token = nn.Embedding(letters, size.width)
        self.place = nn.Parameter(torch.zeros(size.context, size.width))
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, letters, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight  # tied, as in GPT-2

    def forward(self, rows):
        x = self.token(rows[:, :-1]) + self.place[: rows.shape[1] - 1]
        return nn.functional.cross_entropy(self.head(self.norm(self.blocks(x))).mT, rows[:, 1:])


def read_options():
    parser = argparse.ArgumentParser()
    known = {"width": 64, "layers": 2, "heads": 2, "context": 64, "batch": 8, "accumulate": 2}
    known |= {"steps": 100, "evaluate-every": 25, "lr": 3e-3, "dropout": 0.1, "data": ""}
    known |= {"run": "runs/nanogpt", "device": "cuda" if torch.cuda.is_available() else "cpu"}
    for name, value in known.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help="%(default)s")
    return parser.parse_args()


def make_rows(options):
    text = Path(options.data).read_text() if options.data else "".join(topics.values())
    number = {letter: i for i, letter in enumerate(sorted(set(text)))}
    rows = torch.tensor([number[letter] for letter in text]).split(options.context + 1)[:-1]
    return len(number), rows[32:], torch.stack(rows[:32])  # held out: the first few


def main():
    options = read_options()
    torch.manual_seed(1337)
    letters, rows, held_out = make_rows(options)
    model = GPT(letters, options).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)

    def factor(step):  # of the learning rate: up during the first tenth, and down along a cosine
        done = step / options.steps
        return min(1, 0.1 + 10 * done) * (0.55 + 0.45 * math.cos(math.pi * done))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    batches = everystep.data(DataLoader(rows, options.batch, shuffle=True, drop_last=True))
    state = {"scheduler": scheduler, "data": batches}
    with everystep.attach(model, optimizer, run=options.run, state=state) as run:
        for step in run.steps(options.steps):  # what is one optimizer step is one turn
            for _ in range(options.accumulate):
                loss = model(next(batches).to(options.device))
                (loss / options.accumulate).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if (step + 1) % options.evaluate_every == 0:
                model.eval()  # no dropout, no random number: training goes on as if nobody had looked
                with torch.no_grad():
                    value = model(held_out.to(options.device)).item()
                model.train()
                run.report(value)  # from here on checkpoints in the store carry it
                print(f"step {step + 1}: loss {value:.4f} held out, data epoch {batches.epoch}")


if __name__ == "__main__":
    main()
