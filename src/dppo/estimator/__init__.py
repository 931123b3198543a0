"""The statistics, numpy only. Read in this order to see why the pruned gradient is unbiased.

1. `advantages`: what is frozen before anything is pruned, and what has no gradient at all.
2. `sizes`: how much a completion is worth.
3. `inclusion`: size -> inclusion probability.
4. `designs`: probability -> selection.
5. `weights`: selection -> Horvitz-Thompson weight and denominator. The proof is here.
6. `diagnostics`: what it cost.
"""
