"""What `benchmarks/balanced_dp.py` is made of.

Contenders are processes that sleep until they get an order (`contender`, `orders`), train (`training`), start training
(`overheads`) or run a bare model in threads (`lock`). They run in turn (`rounds`), and their times become medians with
intervals (`estimates`), tables (`tables`) and a picture (`picture`).
"""
