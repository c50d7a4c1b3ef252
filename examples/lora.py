"""LoRA with peft: only the adapters train, and only they are written after the first checkpoint.

pip install peft
python examples/lora.py                  # a tiny model with random weights: seconds on a CPU
python examples/lora.py --model gpt2 --target c_attn --data notes.txt --steps 1000
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics  # real text that every Python carries

import torch
from torch.utils.data import DataLoader

import everystep

try:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
except ImportError as missing:
    raise SystemExit(f"examples/lora.py: {missing.msg}; run: pip install peft") from None


def read_options():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", help="a name at Hugging Face, or a folder; none: a tiny one")
    parser.add_argument("--target", nargs="+", default=["q_proj", "v_proj"], help="what is adapted")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--data", help="a text file; none: Python's own documentation")
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--run", default="runs/lora", help="where checkpoints go")
    return parser.parse_args()


def load(options, text):
    """The model, and the text as its tokens."""
    if options.model:
        tokens = AutoTokenizer.from_pretrained(options.model)(text)["input_ids"]
        return AutoModelForCausalLM.from_pretrained(options.model), torch.tensor(tokens)
    tiny = LlamaConfig(
        vocab_size=256,  # bytes are the tokens
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return AutoModelForCausalLM.from_config(tiny), torch.tensor(list(text.encode()))


def main():
    options = read_options()
    torch.manual_seed(3)
    text = Path(options.data).read_text() if options.data else topics["assignment"]
    model, tokens = load(options, text)
    adapters = LoraConfig(r=options.rank, lora_dropout=0.05, target_modules=options.target)
    model = get_peft_model(model, adapters).to(options.device)
    model.print_trainable_parameters()

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    rows = tokens.split(options.context)[:-1]
    batches = everystep.data(DataLoader(rows, options.batch, shuffle=True, drop_last=True))
    # the frozen weights come back too, so a resume does not depend on where they were loaded from
    with everystep.attach(model, optimizer, run=options.run, state={"data": batches}) as run:
        for step in run.steps(options.steps):
            batch = next(batches).to(options.device)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % 10 == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}, data epoch {batches.epoch}")
    model.save_pretrained(Path(options.run).with_suffix(".adapters"))  # as peft loads them


if __name__ == "__main__":
    main()
