"""Stitched models: layers of several pretrained models in one that trains at any batch size."""
