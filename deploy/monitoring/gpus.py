"""The GPU dashboard: dcgm-exporter's series, joined with the ranks that use the GPUs.

The names are DCGM's from before 4.7. Later versions still accept them, with the old units, if they are in
dcgm-exporter's counters file. Its default file lacks some of them and renames others.
"""

from __future__ import annotations

from deploy.monitoring.panels import Panel, PanelRows, firing, worse_above

# The fields that the page and the GPU alerts need, with type and help, as written to the counters file.
DCGM = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("gauge", "Share of time in which any engine was active."),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("gauge", "Share of cycles in which the tensor cores were active."),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("gauge", "Share of cycles in which memory was read or written."),
    "DCGM_FI_PROF_NVLINK_TX_BYTES": ("gauge", "Bytes sent over NVLink per second."),
    "DCGM_FI_PROF_NVLINK_RX_BYTES": ("gauge", "Bytes received over NVLink per second."),
    "DCGM_FI_DEV_FB_USED": ("gauge", "Memory in use in MiB."),
    "DCGM_FI_DEV_FB_FREE": ("gauge", "Free memory in MiB."),
    "DCGM_FI_DEV_GPU_TEMP": ("gauge", "GPU temperature in degrees Celsius."),
    "DCGM_FI_DEV_MEMORY_TEMP": ("gauge", "Memory temperature in degrees Celsius."),
    "DCGM_FI_DEV_POWER_USAGE": ("gauge", "Power in watts."),
    "DCGM_FI_DEV_SM_CLOCK": ("gauge", "SM clock in MHz."),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": ("gauge", "Bit mask of the reasons why the clock is reduced."),
    "DCGM_FI_DEV_THERMAL_VIOLATION": ("counter", "Time with the clock reduced because of heat."),
    "DCGM_FI_DEV_XID_ERRORS": ("gauge", "Number of the last XID error."),
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": ("counter", "Single-bit errors since the driver was loaded."),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": ("counter", "Double-bit errors since the driver was loaded."),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": ("counter", "Rows remapped because of uncorrectable errors."),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": ("gauge", "1 once a row could not be remapped."),
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": ("counter", "CRC errors of NVLink."),
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": ("counter", "Transfers that NVLink retried."),
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": ("counter", "Links that NVLink recovered."),
}
DCGM_LABELS = ("gpu", "UUID")  # of every series: the GPU's number on its node, and lambert_rank_info's gpu_uuid

# Bits of DCGM_FI_DEV_CLOCKS_EVENT_REASONS. Other bits, such as an idle GPU or a clock set by hand, are not faults.
REASONS = {
    "power limit": 0x4,
    "hardware slowdown": 0x8,
    "heat (driver)": 0x20,
    "heat (hardware)": 0x40,
    "power brake": 0x80,
}
FAULTS = [bit for name, bit in REASONS.items() if name != "power limit"]
GPU = "rank {{rank}}, GPU {{gpu}} of {{node}}"


def counters() -> str:
    """Return the counters file, for ``dcgm-exporter --collectors FILE``."""
    return "".join(f"{name}, {kind}, {about}\n" for name, (kind, about) in DCGM.items())


def gpu(expr: str) -> str:
    """Return PromQL that limits a dcgm-exporter series to the run's GPUs and adds their rank and node."""
    ranks = 'topk by (gpu_uuid) (1, lambert_rank_info{run="$run", rank=~"$rank", gpu_uuid!=""})'
    return f'label_replace({expr}, "gpu_uuid", "$1", "UUID", "(.+)") * on (gpu_uuid) group_left (rank, node) {ranks}'


def grown(name: str) -> str:
    """Return PromQL for the increase of a dcgm-exporter counter."""
    return gpu(f"increase(DCGM_FI_DEV_{name}[$__rate_interval])")


def held_down(*bits: int) -> str:
    """Return PromQL that is 1 for each GPU whose clock is reduced for one of the reasons, else 0."""
    each = " + ".join(f"floor(DCGM_FI_DEV_CLOCKS_EVENT_REASONS / {bit}) % 2" for bit in bits)
    return gpu(f"clamp_max({each}, 1)")


# One panel per entry reads better than one argument per line.
# fmt: off
GPUS: PanelRows = {
    "Use": [
        Panel("Busy", "percentunit", "LambertStarved LambertStraggler",
              "Share of time with any work. Good: above 90 %. All dip at once: waiting for data, or a checkpoint.",
              {GPU: gpu("DCGM_FI_PROF_GR_ENGINE_ACTIVE")}),
        Panel("Tensor cores", "percentunit", "LambertThroughputLow",
              "Share of cycles. Good: steady and equal. 0 while busy: matrix products run in plain fp32.",
              {GPU: gpu("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")}),
        Panel("Memory traffic", "percentunit", "LambertThroughputLow",
              "Share of cycles. Good: steady and equal.",
              {GPU: gpu("DCGM_FI_PROF_DRAM_ACTIVE")}),
        Panel("Memory in use", "bytes", "LambertGpuError",
              "Of all processes. Good: flat after the first steps. Above the run's own peak: another process uses it.",
              {GPU: gpu("DCGM_FI_DEV_FB_USED * 1048576")}),
        Panel("Memory in use, share", "percentunit", "LambertGpuError",
              "Good: below 95 %.",
              {GPU: gpu("DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE)")},
              limits=worse_above(0.95)),
        Panel("NVLink", "Bps", "LambertStraggler",
              "Good: equal on all GPUs of a node. 0 on one GPU: its links are down, and it uses PCIe instead.",
              {f"sent, {GPU}": gpu("DCGM_FI_PROF_NVLINK_TX_BYTES"),
               f"received, {GPU}": gpu("DCGM_FI_PROF_NVLINK_RX_BYTES")}),
    ],
    "Heat, power and clocks": [
        Panel("Temperature", "celsius", "LambertGpuThrottled",
              "Good: GPUs below 80, memory below 90. One far above its neighbours: dust, a fan, its place in the rack.",
              {GPU: gpu("DCGM_FI_DEV_GPU_TEMP"), f"memory, {GPU}": gpu("DCGM_FI_DEV_MEMORY_TEMP")},
              limits=worse_above(80, 90)),
        Panel("Power", "watt", "LambertGpuThrottled",
              "Good: equal. One far below the others is waiting or throttled.",
              {GPU: gpu("DCGM_FI_DEV_POWER_USAGE")}),
        Panel("Clock", "hertz", "LambertGpuThrottled LambertStraggler",
              "SM clock. Good: equal. One far below the others is the straggler.",
              {GPU: gpu("DCGM_FI_DEV_SM_CLOCK * 1000000")}),
        Panel("Throttling by reason", "count:GPUs", "LambertGpuThrottled",
              "GPUs with a reduced clock. Good: 0, except for the power limit, which full load can reach.",
              {reason: f"sum({held_down(bit)})" for reason, bit in REASONS.items()}),
        Panel("Throttled GPUs", "none", "LambertGpuThrottled",
              "1: throttled, for any reason except the power limit. Good: 0.",
              {GPU: held_down(*FAULTS)}, "state-timeline", limits=worse_above(1)),
        Panel("Throttled by heat", "none", "LambertGpuThrottled",
              "1: the counter behind the alert is growing. Good: 0.",
              {GPU: gpu("(rate(DCGM_FI_DEV_THERMAL_VIOLATION[$__rate_interval]) > bool 0)")}, "state-timeline",
              limits=worse_above(1)),
    ],
    "Faults": [
        Panel("Last XID", "none", "LambertGpuError",
              "Kept until dcgm-exporter restarts. Good: 0. A program itself causes 13, 31, 43, 45, 68 and 109.",
              {GPU: gpu("DCGM_FI_DEV_XID_ERRORS")}, "state-timeline", 12, worse_above(1)),
        Panel("Row remapping failures", "none", "LambertGpuEcc",
              "1: a memory row could not be remapped; replace the GPU. Good: 0.",
              {GPU: gpu("DCGM_FI_DEV_ROW_REMAP_FAILURE")}, "state-timeline", 12, worse_above(1)),
        Panel("Memory errors", "count:errors", "LambertGpuEcc",
              "Good: no double-bit errors and no remapped rows. Single-bit errors are corrected; they should be rare.",
              {f"double-bit, {GPU}": grown("ECC_DBE_VOL_TOTAL"),
               f"remapped rows, {GPU}": grown("UNCORRECTABLE_REMAPPED_ROWS"),
               f"single-bit, {GPU}": grown("ECC_SBE_VOL_TOTAL")}, width=12),
        Panel("NVLink errors", "count:errors", "LambertGpuError LambertStraggler",
              "Good: 0. Each recovery stalls the all-reduce.",
              {f"{name}, {GPU}": grown(f"NVLINK_{field}_ERROR_COUNT_TOTAL")
               for name, field in {"CRC": "CRC_FLIT", "replay": "REPLAY", "recovery": "RECOVERY"}.items()}, width=12),
        Panel("GPU alerts", "none", "LambertGpuError LambertGpuEcc LambertGpuThrottled",
              "Good: only the line \"none\".",
              {"{{alertname}}": firing("LambertGpu.+", ', run="$run"')}, "state-timeline", 24, worse_above(1)),
        Panel("GPU of each rank", "none", "LambertGpuError",
              "Shows which node to drain. Good: one line per rank. A missing rank has no dcgm-exporter.",
              {"": gpu("DCGM_FI_DEV_XID_ERRORS")}, "table", 24),
    ],
}
