"""Networks as cells that the tests of advice run: each defines ``model``, ``batch`` and ``loss_of(batch)``."""

MODEL = """
import torch, torch.nn as nn, torch.nn.functional as F

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))

class GPT(nn.Module):
    def __init__(self, width=256, depth=4, words=1000):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)
        self.run = lambda block, x: block(x)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x))

model = GPT().cuda()
batch_size = 32
batch = torch.zeros(batch_size, 128, dtype=torch.long, device="cuda")

def loss_of(tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

loss_of(batch).backward()  # the library workspaces are there from here on
model.zero_grad()
"""

CONV = """
import torch, torch.nn as nn, torch.nn.functional as F

class Stage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))

model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.Sequential(*[Stage(32) for _ in range(4)])).cuda()
bs = 16
batch = torch.zeros(bs, 3, 64, 64, device="cuda")

def loss_of(images):
    return model(images).square().mean()

loss_of(batch).backward()
model.zero_grad()
"""

GPT2 = """
import torch, warnings
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=256, n_head=4, vocab_size=512, bos_token_id=0, eos_token_id=0))
model = model.cuda()
model.config.use_cache = False
batch_size = 16
batch = torch.zeros(batch_size, 128, dtype=torch.long, device="cuda")
def loss_of(tokens): return model(input_ids=tokens, labels=tokens).loss
loss_of(batch).backward()
model.zero_grad()
"""

# takes its loss from logits that it casts to float32 itself
LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(num_hidden_layers=2, hidden_size=256, intermediate_size=688, num_attention_heads=4, num_key_value_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=4096)).cuda()
model.config.use_cache = False
batch = torch.zeros(16, 128, dtype=torch.long, device="cuda")
def loss_of(tokens): return model(input_ids=tokens, labels=tokens).loss
loss_of(batch).backward()
model.zero_grad()
"""

ENCODER = """
import torch, torch.nn as nn, torch.nn.functional as F
layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
model = nn.Sequential(nn.Embedding(2000, 256), nn.TransformerEncoder(layer, 3), nn.Linear(256, 2000)).cuda()
batch = torch.zeros(16, 128, dtype=torch.long, device="cuda")
def loss_of(tokens): return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
loss_of(batch).backward()
model.zero_grad()
"""

UPSAMPLING = """
import torch, torch.nn as nn, torch.nn.functional as F
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.norm, self.up, self.out = nn.GroupNorm(8, 64), nn.Conv2d(96, 32, 3, padding=1), nn.Conv2d(32, 3, 1)
    def forward(self, x):
        wide = F.relu(self.down(x))
        deep = F.interpolate(F.silu(self.norm(self.middle(F.max_pool2d(wide, 2)))), scale_factor=2, mode="bilinear")
        return torch.sigmoid(self.out(F.leaky_relu(self.up(torch.cat([wide, deep], 1)))))
model = Net().cuda()
batch = torch.zeros(8, 3, 128, 128, device="cuda")
def loss_of(images): return F.mse_loss(model(images), images)
loss_of(batch).backward()
model.zero_grad()
"""


def recurrent(layers: str) -> str:
    """Return the cell of a recurrent network."""
    return f"""
import torch, torch.nn as nn, torch.nn.functional as F
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.out = nn.Embedding(1000, 128), {layers}, nn.LazyLinear(1000)
    def forward(self, tokens): return self.out(self.layers(self.embed(tokens))[0])
model = Net().cuda()
batch = torch.zeros(256, 20, dtype=torch.long, device="cuda")
def loss_of(tokens): return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
loss_of(batch).backward()
model.zero_grad()
"""


STAGES = """
import torch, torch.nn as nn, torch.nn.functional as F
class Stage(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after)
    def forward(self, x): return F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
stages = nn.Sequential(Stage(3, 16), Stage(16, 32), Stage(32, 64))
model = nn.Sequential(stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).cuda()
batch = torch.zeros(128, 3, 64, 64, device="cuda")
def loss_of(images): return F.cross_entropy(model(images), torch.zeros(len(images), dtype=torch.long, device="cuda"))
loss_of(batch).backward()
model.zero_grad()
"""
