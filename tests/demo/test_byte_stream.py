import torch

from lightning_ddp_ext import TokenCount
from lightning_ddp_ext.demo.byte_text import Paragraphs, StdlibStream, pad


def test_a_stream_yields_all_text_in_pieces(tmp_path):
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_bytes(b"one\n\n" + b"x" * 10)
    second.write_bytes(b"two")
    pieces = [bytes(piece.tolist()) for piece in Paragraphs([first, second], block_size=7)]
    assert pieces == [b"one\n", b"x" * 8, b"xx\n", b"two\n"]


count_tokens = TokenCount(labels="targets")


def test_padding_counts_no_tokens():
    batch = pad([torch.arange(4), torch.arange(9)])
    assert batch["inputs"].tolist()[0] == [0, 1, 2, 0, 0, 0, 0, 0]
    assert batch["targets"].tolist()[0] == [1, 2, 3, -100, -100, -100, -100, -100]
    assert count_tokens(batch) == 11


def test_files_for_training_validation_and_testing_are_distinct():
    data = StdlibStream(files=6)
    data.setup("fit")
    assert len(set(data.train_files)) == 6
    texts = [data.val_data.text.numpy().tobytes(), data.test_data.text.numpy().tobytes()]
    assert texts[0] != texts[1]
    for file in data.train_files:
        assert not any(file.read_bytes() in text for text in texts if file.stat().st_size)
    batch = next(iter(data.train_dataloader()))
    assert batch["inputs"].shape[0] == 8
    assert batch["inputs"].shape[1] <= 128
