"""PTX instructions of the emulated GPU, by kind: each is decoded once and then run step by step."""
