"""One at a time."""

import threading
from pathlib import Path

from outrider.system.file_lock import alone


def test_others_wait(tmp_path: Path) -> None:
    path, done = tmp_path / "locks" / "one", []

    def second() -> None:
        with alone(path):
            done.append("second")

    thread = threading.Thread(target=second)
    with alone(path):
        thread.start()
        thread.join(0.1)  # longer than it would take
        done.append("first")
    thread.join()
    assert done == ["first", "second"] and not path.exists()


def test_where_no_file_can_be_all_go_on(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("a file where the folder should be")
    with alone(tmp_path / "locks" / "one"):
        pass
