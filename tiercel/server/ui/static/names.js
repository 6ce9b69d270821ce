// The names of the tiers: one vocabulary for the whole page.

/** Whether one memory is device and host tier at once, as on a CPU without a device pool of its own. */
export function isUnified({ engine, tiers }) {
  return engine.device === 'cpu' && !tiers.some((tier) => tier.tier === 'ddr');
}

/** Return the name of a tier. On a CPU there is no HBM: both upper tiers lie in RAM. */
export function nameOf(tier, latest) {
  if (tier === 'ssd') return 'SSD';
  if (!latest.engine.device) return 'KV cache';
  if (latest.engine.device !== 'cpu') return tier === 'hbm' ? 'HBM' : 'DDR';
  if (isUnified(latest)) return 'RAM';
  return tier === 'hbm' ? 'RAM, device pool' : 'RAM, host tier';
}
