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
torch.backends.cudnn.allow_tf32 = job["precision"] == "tf32"
torch.backends.cudnn.benchmark = True
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
        logits = logits.view(-1, logits.shape[-1])
        # Autocast does so by itself.
        return F.cross_entropy(logits.float() if offload else logits, targets.view(-1))


def transformers_model(kind):
    """The transformers library's own model, with its attention through scaled_dot_product_attention."""
    try:
        import transformers
    except ImportError:
        sys.exit("the peer: this Python has no transformers (pip install transformers)")
    values = {key: value for key, value in config.items() if key != "model_type"}
    settings = transformers.AutoConfig.for_model(config["model_type"], **values)
    return getattr(transformers, kind).from_config(settings, attn_implementation="sdpa")


class OfTokens(nn.Module):
    def __init__(self):
        super().__init__()
        masked = config["model_type"] == "bert"
        self.options = {} if masked else {"use_cache": False}
        self.model = transformers_model("AutoModelForMaskedLM" if masked else "AutoModelForCausalLM")

    def forward(self, tokens, targets):
        logits = self.model(input_ids=tokens, **self.options).logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


class OfImages(nn.Module):
    """torchvision's model, or transformers' ViT."""

    def __init__(self):
        super().__init__()
        self.convolutional = config["model_type"] == "torchvision"
        self.model = self.torchvision() if self.convolutional else transformers_model("AutoModelForImageClassification")

    def torchvision(self):
        try:
            import torchvision
        except ImportError:
            sys.exit("the peer: this Python has no torchvision (pip install torchvision)")
        # Ours has no auxiliary classifier, and starts from the same weights.
        options = {"aux_logits": False, "init_weights": True} if config["name"] == "inception_v3" else {}
        model = getattr(torchvision.models, config["name"])(num_classes=config["classes"], **options)
        size = config["image_size"] // 32
        if hasattr(model, "features") and size != 7:
            # Its pool would make any image one of 224: ours has none.
            model.avgpool = nn.Identity()
            model.classifier[0] = nn.Linear(512 * size * size, 4096)
        return model

    def forward(self, images, targets):
        logits = self.model(images) if self.convolutional else self.model(pixel_values=images).logits
        return F.cross_entropy(logits.float(), targets)


def offloaded(model):
    """The model through FSDP2 with parameters, gradients and optimizer state in host memory; blocks are gathered for use,
    and their activations made again."""
    import torch.distributed as dist
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh(device.type, (1,))
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu),
    }
    blocks = max((m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))), key=len)
    for place in range(len(blocks)):
        blocks[place] = checkpoint_wrapper(blocks[place])
        fully_shard(blocks[place], **options)
    fully_shard(model, **options)
    return model


before = resident()
family = config["model_type"]
convolutional = family == "torchvision"
offload = job.get("offload", False)
with torch.device("cpu") if offload else device:
    if family == "gpt2":
        model = Gpt2(config["n_embd"], config["n_layer"], config["n_head"], config["vocab_size"])
    else:
        model = OfImages() if convolutional or family == "vit" else OfTokens()
model.train()
if offload:
    model = offloaded(model)
if convolutional:
    options = {"lr": 1e-4, "momentum": 0.9, "weight_decay": 1e-4, "fused": True}
    optimizer, clip = torch.optim.SGD(model.parameters(), **options), None
else:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer, clip = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True), 1.0
scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)
if convolutional or family == "vit":
    classes = config["classes"] if convolutional else len(config["id2label"])
    inputs = torch.randn(batch, 3, config["image_size"], config["image_size"], device=device)
    targets = torch.randint(classes, (batch,), device=device)
else:
    rows = torch.randint(config["vocab_size"], (batch, sequence + 1), device=device)
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
cast = torch.autocast(device.type, half) if half and not offload else contextlib.nullcontext()
forward = model


def step():
    if job["compile"]:
        torch.compiler.cudagraph_mark_step_begin()
    with cast:
        loss = forward(inputs, targets)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    if clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    return loss


def arrange(layout):
    """Weights and images in the layout."""
    global inputs
    model.to(memory_format=layout)
    inputs = inputs.contiguous(memory_format=layout)


def seconds_of(layout, steps=2):
    arrange(layout)
    step()
    started = time.perf_counter()
    for _ in range(steps):
        step().item()
    return time.perf_counter() - started


if convolutional:
    layouts = [torch.channels_last] if on_gpu else [torch.channels_last, torch.contiguous_format]
    # On a processor neither is always the faster.
    arrange(min(layouts, key=seconds_of) if len(layouts) > 1 else layouts[0])
if job["compile"]:
    forward = torch.compile(model, mode="reduce-overhead") if convolutional else torch.compile(model)

for line in sys.stdin:
    started = time.perf_counter()
    for _ in range(int(line)):
        loss = step()
    value = loss.item()
    print(time.perf_counter() - started, value, flush=True)
print(torch.cuda.max_memory_allocated() if on_gpu else resident() - before, flush=True)
