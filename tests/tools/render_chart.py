"""Renders the Helm chart's examples, and copies the rules and alerts into the chart.

    python -m tests.tools.render_chart

Run it after a change to deploy/helm or deploy/monitoring; a test compares the result with what is committed.
"""

from __future__ import annotations

import shutil
import sys

from tests.helpers.helm import CHART, EXAMPLES, FOLDER, MONITORING, RULES, template


def rewrite() -> None:
    """Write the chart's copies and all examples. Raises NoHelmError, and SystemExit with Helm's own line."""
    for name in RULES:
        shutil.copyfile(MONITORING / name, CHART / "monitoring" / name)
    for name in EXAMPLES:
        done = template(name)
        if done.returncode != 0:
            sys.exit(f"{name}: {done.stderr}")
        (FOLDER / f"{name}.yaml").write_text(done.stdout, encoding="utf-8")


if __name__ == "__main__":
    rewrite()
