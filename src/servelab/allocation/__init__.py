"""What allocators leave of a cache and what sharing saves: the experiments of chapters 5 and 7.

Read, for the waste: buddy, layouts (contiguous regions and paging behind one interface), lengths
(of requests), saturation (a queue that fills the cache), fragmentation (the vLLM paper's Figure 2).
For the sharing: sharing (samples and beams of one prompt), hits (prompts of a trace). No engine
runs here; import each from its module.
"""
