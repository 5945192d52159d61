// Numbers as words, the same as the command line prints them: units are powers of 1024.

const UNITS = ["B", "KB", "MB", "GB", "TB", "PB", "EB"];

export function size(count) {
  if (count === null || count === undefined) return "unknown";
  let power = 0, value = count;
  while (value >= 1024 && power < UNITS.length - 1) { value /= 1024; power += 1; }
  if (power === 0) return `${Math.round(value)} B`;
  const shown = value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0);
  if (Number(shown) >= 1024 && power < UNITS.length - 1) return `1 ${UNITS[power + 1]}`;
  return `${shown.includes(".") ? shown.replace(/\.?0+$/, "") : shown} ${UNITS[power]}`;
}

export function percent(share) {
  return share === null ? "unknown" : `${Math.round(share * 100)}%`;
}

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  for (const [unit, name, lower, lowerName] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (whole >= unit) {
      const rest = Math.floor((whole % unit) / lower);
      return `${Math.floor(whole / unit)} ${name}${rest ? ` ${rest} ${lowerName}` : ""}`;
    }
  }
  return `${whole} s`;
}

// For an axis: readings are a second or so apart, so a chart of 5 minutes begins 4 min 59 s ago.
export function rounded(seconds) {
  const step = seconds < 60 ? 1 : seconds < 3600 ? 5 : 60;
  return duration(Math.round(seconds / step) * step);
}

export function timeOfDay(when) {
  return new Date(when * 1000).toLocaleTimeString();
}
