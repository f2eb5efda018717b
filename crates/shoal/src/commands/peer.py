"""The other side of `shoal bench`: the same model, batch and optimizer in PyTorch.

Takes one JSON object as its argument. For each line on stdin (a number of steps) it prints the seconds they took
and the loss; at the end of input, the most memory it had.
"""

import contextlib
import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

job = json.loads(sys.argv[1])
config, batch, sequence = job["config"], job["batch"], job["sequence"]
device = torch.device(job["device"])
on_gpu = device.type == "cuda"
torch.set_num_threads(job["threads"])
torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = job["precision"] == "tf32"
half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job["precision"])


def resident():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, width, layers, heads, vocabulary):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits = F.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class FromTransformers(nn.Module):
    """The transformers library's own model, with its attention through scaled_dot_product_attention."""

    def __init__(self):
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

        masked = config["model_type"] == "bert"
        kind = AutoModelForMaskedLM if masked else AutoModelForCausalLM
        self.options = {} if masked else {"use_cache": False}
        values = {key: value for key, value in config.items() if key != "model_type"}
        settings = AutoConfig.for_model(config["model_type"], **values)
        self.model = kind.from_config(settings, attn_implementation="sdpa")

    def forward(self, tokens, targets):
        logits = self.model(input_ids=tokens, **self.options).logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


before = resident()
with device:
    if config["model_type"] == "gpt2":
        model = Gpt2(config["n_embd"], config["n_layer"], config["n_head"], config["vocab_size"])
    else:
        model = FromTransformers()
model.train()
groups = [
    {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)
rows = torch.randint(config["vocab_size"], (batch, sequence + 1), device=device)
tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
forward = torch.compile(model) if job["compile"] else model
cast = torch.autocast(device.type, half) if half else contextlib.nullcontext()


def step():
    with cast:
        loss = forward(tokens, targets)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss


for line in sys.stdin:
    started = time.perf_counter()
    for _ in range(int(line)):
        loss = step()
    value = loss.item()
    print(time.perf_counter() - started, value, flush=True)
print(torch.cuda.max_memory_allocated() if on_gpu else resident() - before, flush=True)
