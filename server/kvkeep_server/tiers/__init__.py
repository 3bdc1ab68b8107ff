"""The places that hold blocks, behind one protocol: `base.Tier`."""
