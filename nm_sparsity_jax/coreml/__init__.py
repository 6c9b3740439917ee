"""A finalized network as a Core ML package, by way of torch: an encoder of T5, or a ViT.

    tensors of theirs names -> networks -> torch module -> [agrees] -> [convert] -> F.mlpackage
    F.mlpackage -> Package: arrays with their zeros, which of them are stored without, bytes

torch and coremltools are the extra `coreml`, and imported when a module of this folder is. Neither
runs a Core ML model on Linux, so nothing here says how fast one is.
"""
