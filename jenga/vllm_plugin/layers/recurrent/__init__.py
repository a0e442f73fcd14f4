"""Recurrent layers: Mamba, linear attention, gated delta rules and short convolutions."""
