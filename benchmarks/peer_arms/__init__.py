"""The arms of peers.py, peer_samples.py and laws.py: Outrider and other programs, each with its ways to generate.

Every arm takes and gives token ids, the same number whatever the tokens are (llama.cpp forbids end tokens where the
others take them as tokens like all). Temperature 1 is pure sampling: no top-k, top-p, min-p or penalties. How each
program takes its weights (``--weights``) is said in its file here. Weights of 8 bits are the target's alone.

Each program has a process of its own: in one process their pools of threads get in each other's way (Outrider took four
times as long beside idle llama.cpp servers and OpenVINO pipelines), which says nothing of any of them.
"""
