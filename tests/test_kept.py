"""Files that are made once: by one of several processes, read without being asked to write."""

import os
from contextlib import contextmanager
from unittest.mock import Mock

import filelock
import pytest

from train.data.kept import kept, mapped


def test_text_larger_than_the_memory_is_mapped(tmp_path):
    (tmp_path / "text.bytes").touch()
    os.truncate(tmp_path / "text.bytes", 2**42)  # a sparse file: nothing is on the disk
    assert len(mapped(tmp_path / "text.bytes")) == 2**42


def test_what_another_process_has_made_meanwhile_is_left(tmp_path, monkeypatch):
    @contextmanager
    def waited(_):
        (tmp_path / "text").write_bytes(b"whole")
        yield

    monkeypatch.setattr(filelock, "FileLock", waited)
    kept(tmp_path / "text", write := Mock(), "data.cache")
    write.assert_not_called()
    assert (tmp_path / "text").read_bytes() == b"whole"


def test_a_folder_that_takes_no_file_is_read_from(tmp_path, monkeypatch):
    monkeypatch.setattr(filelock, "FileLock", Mock(side_effect=PermissionError("denied")))
    with pytest.raises(PermissionError, match=rf"{tmp_path} takes no file \(denied\); give data.cache=a folder"):
        kept(tmp_path / "text", Mock(), "data.cache")
    (tmp_path / "text").write_bytes(b"whole")
    assert bytes(mapped(kept(tmp_path / "text", Mock(), "data.cache")).tolist()) == b"whole"
