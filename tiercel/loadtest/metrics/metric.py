"""Names of server metrics: those of vLLM where the meaning is the same, ours for tiers, transfers and tenants."""

PAGE = "/metrics?detail=tenants"
"""Path of the metrics page. Servers without such a detail ignore the parameter."""

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
HOST_USAGE = "vllm:kv_offload_cpu_cache_usage_perc"
PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
GENERATION_TOKENS = "vllm:generation_tokens_total"
REJECTIONS = "vllm:admission_rejections_total"
PREEMPTIONS = "vllm:num_preemptions_total"
PREEMPTIONS_BY_MODE = "tiercel_preemptions_total"  # mode: swap or recompute

KV_USED = "tiercel_kv_used_bytes"  # tier
KV_CAPACITY = "tiercel_kv_capacity_bytes"  # tier
TIERS = ("hbm", "ddr", "ssd")

TRANSFER_BYTES = "tiercel_kv_transfer_bytes_total"  # route
TRANSFER_SECONDS = "tiercel_kv_transfer_seconds_total"  # route
ROUTES = {"hbm_ddr": "HBM to DDR", "ddr_hbm": "DDR to HBM", "ddr_ssd": "DDR to SSD", "ssd_ddr": "SSD to DDR"}
OFFLOAD_BYTES = {"hbm_ddr": "vllm:kv_offload_store_bytes_total", "ddr_hbm": "vllm:kv_offload_load_bytes_total"}
"""vLLM's metric for the bytes of a route."""

TENANT_RUNNING = "tiercel_tenant_running"
TENANT_WAITING = "tiercel_tenant_waiting"
TENANT_PROMPT_TOKENS = "tiercel_tenant_prompt_tokens_total"
TENANT_GENERATION_TOKENS = "tiercel_tenant_generation_tokens_total"
TENANT_SERVICE = "tiercel_tenant_service_seconds_total"
TENANT_WEIGHT = "tiercel_tenant_weight"
TENANT_THROTTLED = "tiercel_tenant_throttled_by_reason_total"  # reason

REPORTED = (
    *(PREEMPTIONS, PREEMPTIONS_BY_MODE, TRANSFER_BYTES, TRANSFER_SECONDS, *OFFLOAD_BYTES.values()),
    *(PREFIX_QUERIES, PREFIX_HITS, PROMPT_TOKENS, GENERATION_TOKENS, REJECTIONS),
    *(TENANT_PROMPT_TOKENS, TENANT_GENERATION_TOKENS, TENANT_SERVICE, TENANT_THROTTLED),
)
"""Counters whose growth over the run a report shows."""
