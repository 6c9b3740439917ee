"""What timm computes of networks as tiny as ours for tests, for tests that have no torch.

    python tests/vision_reference.py      writes tests/vision_reference.npz anew; needs timm

Weights and images are integers that are hashed, so both sides make them by themselves.
"""

import json
import pathlib
import zlib

import numpy as np

FILE = pathlib.Path(__file__).with_suffix(".npz")

# Arguments of timm's classes for the networks of these names.
TINY = {
  "vit_test": dict(
    img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, mlp_ratio=2, num_classes=10
  ),
  "swinv2_test": dict(
    img_size=32, patch_size=4, embed_dim=16, depths=(2, 1, 1), num_heads=(1, 2, 2), window_size=4,
    mlp_ratio=2, num_classes=10,
  ),
  "resnet_test": dict(layers=(1, 2, 1, 1), channels=(64, 16, 16, 32), num_classes=10),
}  # fmt: skip

# Added to a scale of cosines, which then is beyond its clamp at 4.6.
CLAMPED = 4


def hashed(name, shape):
  """float32 in [-1, 1), each a multiple of 2^-23: a hash of the name and of the place."""
  x = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) << 32)
  for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
    x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
  x = (x ^ (x >> np.uint64(31))) >> np.uint64(40)
  return (x.astype(np.float32) / np.float32(1 << 23) - np.float32(1)).reshape(shape)


def values(name, shape):
  """A tensor of timm's name: about what a trained network holds, and nothing is 0 or 1."""
  if name.endswith("num_batches_tracked"):
    return np.zeros(shape, np.int64)
  x = hashed(name, shape)
  if name.endswith("logit_scale"):
    return x + np.float32(2.5)
  if name.endswith("running_var"):
    return np.float32(1.25) + x
  if len(shape) > 1 and "embed" not in name.split(".")[-1]:
    return x * np.float32(np.sqrt(3 / np.prod(shape[1:])))
  return np.float32(name.endswith("weight")) + x / np.float32(4)


def images(name, size, count=2):
  return hashed(f"images of {name}", (count, size, size, 3)) * np.float32(2)


def network(timm, name):
  """timm's network of a name, with hashed weights, in evaluation, in float64.

  In float32 its own gradient of a Swin is off by as much as 3e-5.
  """
  import torch

  arguments, module = TINY[name], timm.models
  if name.startswith("vit"):
    net = module.vision_transformer.VisionTransformer(**arguments)
  elif name.startswith("swin"):
    net = module.swin_transformer_v2.SwinTransformerV2(
      **arguments, pretrained_window_sizes=(0,) * len(arguments["depths"])
    )
  else:
    net = module.resnet.ResNet(module.resnet.Bottleneck, **arguments)
  made = {key: torch.tensor(values(key, tuple(x.shape))) for key, x in net.state_dict().items()}
  net.load_state_dict(made)
  return net.double().eval()


def run(net, name, size, count=2):
  """Logits, and the gradient of a weighted sum of them with respect to the images (NHWC)."""
  import torch

  x = torch.tensor(images(name, size, count)).double().permute(0, 3, 1, 2).requires_grad_()
  logits = net(x)
  weights = torch.tensor(hashed(f"weights of {name}", tuple(logits.shape)))
  (logits * weights).sum().backward()
  plain = lambda x: x.detach().float().numpy()
  return plain(logits), plain(x.grad.permute(0, 2, 3, 1))


def make(timm):
  """name/what -> array, of each tiny network."""
  found = {}
  for name, arguments in TINY.items():
    size = arguments.get("img_size", 32)
    net = network(timm, name)
    state = {key: list(x.shape) for key, x in net.state_dict().items()}
    found[f"{name}/names"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    found[f"{name}/logits"], found[f"{name}/gradient"] = run(net, name, size)
    if "window_size" in arguments:
      net.layers[-1].blocks[0].attn.logit_scale.data += CLAMPED
      found[f"{name}/clamped"], _ = run(net, name, size)
    if "layers" in arguments:  # in training, by the statistics of the batch
      found[f"{name}/train_logits"], _ = run(net.train(), name, size, 8)
      new = {key: x.float().numpy() for key, x in net.state_dict().items() if "running" in key}
      found |= {f"{name}/new/{key}": x for key, x in new.items()}
  return found


if __name__ == "__main__":
  from reference_arrays import imported

  np.savez_compressed(FILE, **make(*imported("timm")))
