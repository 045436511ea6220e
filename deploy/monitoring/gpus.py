"""The GPU page: dcgm-exporter's series, joined with the ranks that the GPUs serve.

The names are those that DCGM had before 4.7. Later ones still know them, with their old units, as long as
dcgm-exporter gets them in its file of counters; its own file neither has all of them nor keeps their names.
"""

from __future__ import annotations

from deploy.monitoring.panels import Panel, Rows, firing, worse_above

# What the page and the alerts on GPUs need: field, type and help, as the file of counters has them.
DCGM = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("gauge", "Share of time in which any engine worked."),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("gauge", "Share of cycles in which the tensor cores worked."),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("gauge", "Share of cycles in which the memory sent or received."),
    "DCGM_FI_PROF_NVLINK_TX_BYTES": ("gauge", "Bytes a second sent over NVLink."),
    "DCGM_FI_PROF_NVLINK_RX_BYTES": ("gauge", "Bytes a second received over NVLink."),
    "DCGM_FI_DEV_FB_USED": ("gauge", "Memory in use in MiB."),
    "DCGM_FI_DEV_FB_FREE": ("gauge", "Free memory in MiB."),
    "DCGM_FI_DEV_GPU_TEMP": ("gauge", "Temperature of the chip in degrees Celsius."),
    "DCGM_FI_DEV_MEMORY_TEMP": ("gauge", "Temperature of the memory in degrees Celsius."),
    "DCGM_FI_DEV_POWER_USAGE": ("gauge", "Power in watts."),
    "DCGM_FI_DEV_SM_CLOCK": ("gauge", "Clock of the multiprocessors in MHz."),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": ("gauge", "Why the clock is held down: a sum of bits."),
    "DCGM_FI_DEV_THERMAL_VIOLATION": ("counter", "Time for which heat held the clock down."),
    "DCGM_FI_DEV_XID_ERRORS": ("gauge", "Number of the last XID error."),
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": ("counter", "Single-bit errors since the driver was loaded."),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": ("counter", "Double-bit errors since the driver was loaded."),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": ("counter", "Rows remapped for errors that cannot be corrected."),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": ("gauge", "1 once a row could not be remapped."),
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": ("counter", "CRC errors of NVLink."),
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": ("counter", "Transfers that NVLink took again."),
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": ("counter", "Links that NVLink brought up again."),
}
DCGM_LABELS = ("gpu", "UUID")  # of each of them: the GPU's number on its node, and lambert_rank_info's gpu_uuid

# Bits of DCGM_FI_DEV_CLOCKS_EVENT_REASONS. Others, such as an idle GPU or clocks that were set, are no fault.
REASONS = {
    "power limit": 0x4,
    "hardware slowdown": 0x8,
    "heat, by the driver": 0x20,
    "heat, by the hardware": 0x40,
    "power brake": 0x80,
}
FAULTS = [bit for name, bit in REASONS.items() if name != "power limit"]
GPU = "rank {{rank}}, GPU {{gpu}} of {{node}}"


def counters() -> str:
    """The file of counters: ``dcgm-exporter --collectors FILE``."""
    return "".join(f"{name}, {kind}, {about}\n" for name, (kind, about) in DCGM.items())


def gpu(expr: str) -> str:
    """A series of dcgm-exporter for the run's GPUs alone, with the rank that each GPU serves and its node."""
    ranks = 'topk by (gpu_uuid) (1, lambert_rank_info{run="$run", rank=~"$rank", gpu_uuid!=""})'
    return f'label_replace({expr}, "gpu_uuid", "$1", "UUID", "(.+)") * on (gpu_uuid) group_left (rank, node) {ranks}'


def grown(name: str) -> str:
    """By how much a counter of dcgm-exporter grew."""
    return gpu(f"increase(DCGM_FI_DEV_{name}[$__rate_interval])")


def held_down(*bits: int) -> str:
    """1 for each GPU whose clock is held down for one of the reasons, else 0."""
    each = " + ".join(f"floor(DCGM_FI_DEV_CLOCKS_EVENT_REASONS / {bit}) % 2" for bit in bits)
    return gpu(f"clamp_max({each}, 1)")


# A table is read by its lines.
# fmt: off
GPUS: Rows = {
    "Use": [
        Panel("Busy", "percentunit", "LambertStarved LambertStraggler",
              "Share of time with any work. Good: above 90 %. Dips of all at once: data, or a checkpoint.",
              {GPU: gpu("DCGM_FI_PROF_GR_ENGINE_ACTIVE")}),
        Panel("Tensor cores", "percentunit", "LambertThroughputLow",
              "Share of cycles. Good: steady and alike. 0 while busy: the matrix products run in plain fp32.",
              {GPU: gpu("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")}),
        Panel("Memory traffic", "percentunit", "LambertThroughputLow",
              "Share of cycles. Good: steady and alike.",
              {GPU: gpu("DCGM_FI_PROF_DRAM_ACTIVE")}),
        Panel("Memory in use", "bytes", "LambertGpuError",
              "By all processes. Good: level after the first steps. More than the run's own peak: somebody else's.",
              {GPU: gpu("DCGM_FI_DEV_FB_USED * 1048576")}),
        Panel("Memory in use, share", "percentunit", "LambertGpuError",
              "Good: below 95 %.",
              {GPU: gpu("DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE)")},
              limits=worse_above(0.95)),
        Panel("NVLink", "Bps", "LambertStraggler",
              "Good: alike on all GPUs of a node. 0 on one of them: its links are down, and it reduces over PCIe.",
              {f"sent, {GPU}": gpu("DCGM_FI_PROF_NVLINK_TX_BYTES"),
               f"received, {GPU}": gpu("DCGM_FI_PROF_NVLINK_RX_BYTES")}),
    ],
    "Heat, power and clocks": [
        Panel("Temperature", "celsius", "LambertGpuThrottled",
              "Good: chips below 80, memory below 90. One far above its neighbours: dust, a fan, a place in the rack.",
              {GPU: gpu("DCGM_FI_DEV_GPU_TEMP"), f"memory, {GPU}": gpu("DCGM_FI_DEV_MEMORY_TEMP")},
              limits=worse_above(80, 90)),
        Panel("Power", "watt", "LambertGpuThrottled",
              "Good: alike. One far below the others waits, or is held down.",
              {GPU: gpu("DCGM_FI_DEV_POWER_USAGE")}),
        Panel("Clock", "hertz", "LambertGpuThrottled LambertStraggler",
              "Of the multiprocessors. Good: alike. One far below the others is the straggler.",
              {GPU: gpu("DCGM_FI_DEV_SM_CLOCK * 1000000")}),
        Panel("Held down, by reason", "count:GPUs", "LambertGpuThrottled",
              "Good: 0 but for the power limit, which full load may well reach.",
              {reason: f"sum({held_down(bit)})" for reason, bit in REASONS.items()}),
        Panel("Held down, by GPU", "none", "LambertGpuThrottled",
              "1: for any reason but the power limit. Good: 0.",
              {GPU: held_down(*FAULTS)}, "state-timeline", limits=worse_above(1)),
        Panel("Held down by heat", "none", "LambertGpuThrottled",
              "1: the counter that the alert watches grows. Good: 0.",
              {GPU: gpu("(rate(DCGM_FI_DEV_THERMAL_VIOLATION[$__rate_interval]) > bool 0)")}, "state-timeline",
              limits=worse_above(1)),
    ],
    "Faults": [
        Panel("Last XID", "none", "LambertGpuError",
              "Kept until dcgm-exporter starts anew. Good: 0. 13, 31, 43, 45, 68 and 109 are a program's own.",
              {GPU: gpu("DCGM_FI_DEV_XID_ERRORS")}, "state-timeline", 12, worse_above(1)),
        Panel("Memory rows that could not be remapped", "none", "LambertGpuEcc",
              "1: the GPU is out of spare rows, and must be replaced. Good: 0.",
              {GPU: gpu("DCGM_FI_DEV_ROW_REMAP_FAILURE")}, "state-timeline", 12, worse_above(1)),
        Panel("Memory errors", "count:errors", "LambertGpuEcc",
              "Good: none of two bits, and no remapped rows; those of one bit are corrected, and seldom.",
              {f"two bits, {GPU}": grown("ECC_DBE_VOL_TOTAL"),
               f"remapped rows, {GPU}": grown("UNCORRECTABLE_REMAPPED_ROWS"),
               f"one bit, {GPU}": grown("ECC_SBE_VOL_TOTAL")}, width=12),
        Panel("NVLink errors", "count:errors", "LambertGpuError LambertStraggler",
              "Good: 0. Each recovery stalls the reduction.",
              {f"{name}, {GPU}": grown(f"NVLINK_{field}_ERROR_COUNT_TOTAL")
               for name, field in {"CRC": "CRC_FLIT", "replay": "REPLAY", "recovery": "RECOVERY"}.items()}, width=12),
        Panel("Alerts on GPUs", "none", "LambertGpuError LambertGpuEcc LambertGpuThrottled",
              "Good: the line none, alone.",
              {"{{alertname}}": firing("LambertGpu.+", ', run="$run"')}, "state-timeline", 24, worse_above(1)),
        Panel("Which GPU is which", "none", "LambertGpuError",
              "Whom to drain. Good: one line for each rank; one that is missing has no dcgm-exporter.",
              {"": gpu("DCGM_FI_DEV_XID_ERRORS")}, "table", 24),
    ],
}
