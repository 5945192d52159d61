"""Trials of Ray Tune on one node share one set of workers by giving the same name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import rig_cleanup
import rigs

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(900)]
PROGRAM = """
import json, os, sys, time, warnings
warnings.filterwarnings("ignore")
sys.path.insert(0, sys.argv[1])
import ray
from ray import tune

FOLDER = sys.argv[2]


def trial(config):
    import share_data
    import legroom
    loader = legroom.DataLoader(
        share_data.Noise(400, seconds=0.002), 4, shuffle=True, num_workers=2, share="search")
    lines, shared = [], 0
    for number, batch in enumerate(loader):
        lines.append(share_data.line(0, number, batch))
        group = loader._sharing._group
        shared += group.welcome and not group.missed
        # After the first batch, wait until the trials are a group: its producer takes seconds to start.
        open(os.path.join(FOLDER, f"{config['rate']}"), "w").close()
        until = time.monotonic() + 120
        while number == 0 and len(os.listdir(FOLDER)) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        if not shared and number < 60:
            time.sleep(0.2)
    tune.report({"shared": shared, "digest": hash(tuple(lines)), "count": len(lines), "pid": os.getpid()})


env = {"PYTHONHASHSEED": "0", "LEGROOM_SHM": os.environ["LEGROOM_SHM"],
       "PYTHONPATH": sys.argv[1] + os.pathsep + os.environ.get("PYTHONPATH", "")}
ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False,
         _temp_dir=os.path.join(os.path.dirname(FOLDER), "ray"),
         runtime_env={"env_vars": env})
tuner = tune.Tuner(tune.with_resources(trial, {"cpu": 1}), param_space={"rate": tune.grid_search([1, 2, 3])},
                   run_config=tune.RunConfig(storage_path=sys.argv[3], verbose=0))
found = [result.metrics or {"error": str(result.error)} for result in tuner.fit()]
print(json.dumps([{name: one.get(name) for name in ("shared", "digest", "count", "pid", "error")} for one in found]))
ray.shutdown()
"""


def test_trials_with_the_same_name_share_one_set_of_workers() -> None:
    pytest.importorskip("ray.tune", reason="ray[tune] is not installed", exc_type=ImportError)
    unit = Path(__file__).parents[1] / "unit" / "loader"
    with rig_cleanup.named() as name:
        place = Path("/var/tmp") / name
        for folder in ("started", "store", "results"):
            (place / folder).mkdir(0o700, parents=True)
        env = {
            **os.environ,
            rig_cleanup.MARK: name,
            "LEGROOM_SHM": f"{place}/store",
            "HOME": str(place),
            "RAY_AUTH_MODE": "disabled",
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_gcs_server_request_timeout_seconds": "120",
            "RAY_enable_metrics_collection": "0",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        }
        command = [sys.executable, "-c", PROGRAM, str(unit), f"{place}/started", f"{place}/results"]
        if rigs.why_no_rigs() is None:  # Ray's processes end with this namespace, also if the program is killed
            command = rigs.own_pids(command)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert [one["count"] for one in found] == [100] * 3, found
        assert len({one["digest"] for one in found}) == 1 and len({one["pid"] for one in found}) == 3
        assert all(one["shared"] > 5 for one in found), found
