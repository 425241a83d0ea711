"""What a delete would lose: git work trees under /work with changes that no remote has."""

from __future__ import annotations

import base64
import secrets
from typing import Any

from node.guest import Guest
from node.protocol import RunCommand, UnsavedWork

REPOSITORIES = 20
WITHIN = 30.0

# Prints a line a repository: branch, uncommitted files, unpushed commits and path, tab-separated; the path may hold anything.
SCRIPT = r"""
find /work -xdev -maxdepth 5 -name node_modules -prune -o -name .git -print 2>/dev/null | head -n LIMIT | while IFS= read -r git; do
    tree=${git%/.git}
    branch=$(git -C "$tree" symbolic-ref --short -q HEAD || echo detached)
    changed=$(git -C "$tree" status --porcelain 2>/dev/null | head -n 1000 | wc -l)
    ahead=$(git -C "$tree" rev-list --count HEAD --not --remotes 2>/dev/null || echo 0)
    printf '%s\t%s\t%s\t%s\n' "$branch" "$changed" "$ahead" "$tree"
done
""".replace("LIMIT", str(REPOSITORIES + 1))


async def look_for_unsaved_work(guest: Guest) -> UnsavedWork:
    """Looks at REPOSITORIES work trees for at most WITHIN seconds; `more` says that the look was cut."""
    request = RunCommand(exec_id=f"unsaved-{secrets.token_hex(6)}", cmd=SCRIPT, cwd="/", timeout_sec=WITHIN)
    command = await guest.run(request, wait=WITHIN)
    lines = base64.b64decode(command.stdout.text_b64 if command.stdout else "").decode(errors="replace").splitlines()
    return UnsavedWork(
        repositories=[found for line in lines[:REPOSITORIES] if (found := read_line(line))],
        more=len(lines) > REPOSITORIES or command.timed_out or command.running,
    )


def read_line(line: str) -> dict[str, Any] | None:
    """A repository with something to lose, else None."""
    branch, changed, ahead, path = (line.split("\t", 3) + [""] * 4)[:4]
    if not (changed.isdecimal() and ahead.isdecimal()) or changed == ahead == "0":
        return None
    return {"path": path, "branch": branch, "uncommitted": int(changed), "unpushed": int(ahead)}
