//! Words for messages. Names come from files that may be hostile, so they are escaped and cut before they
//! reach a terminal; sizes are given in units people compare with what `df` shows.

/// Characters of a foreign name or message that are shown.
const SHOWN_CHARS_MAX: usize = 200;

/// Names offered when the one asked for is missing.
const NEAREST_NAMES: usize = 5;

/// Names compared when looking for the nearest one: bounds the time a hostile header can cost.
const COMPARED_NAMES_MAX: usize = 10_000;

/// Foreign text with control characters escaped and its length bounded.
pub(crate) fn printable(text: &str) -> String {
    let mut shown: String = text.chars().take(SHOWN_CHARS_MAX).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN_CHARS_MAX).is_some() {
        shown.push('…');
    }
    shown
}

/// A tensor's name as messages show it.
pub(crate) fn quoted(name: &str) -> String {
    format!("`{}`", printable(name))
}

/// Several names, as messages list them.
pub(crate) fn quoted_list(names: &[String]) -> String {
    names.iter().map(|name| quoted(name)).collect::<Vec<_>>().join(", ")
}

/// A size in bytes, in decimal units.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if bytes < 1000 {
        return format!("{bytes} bytes");
    }
    let mut value = bytes as f64 / 1000.0;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// The few names nearest to any of `wanted`, nearest first, ties in name order.
pub(crate) fn nearest<'a>(wanted: &[String], available: impl Iterator<Item = &'a str>) -> Vec<String> {
    let cut = |name: &str| name.chars().take(SHOWN_CHARS_MAX).collect::<String>();
    let wanted: Vec<String> = wanted.iter().map(|name| cut(name)).collect();
    let mut scored: Vec<(usize, &str)> = available
        .take(COMPARED_NAMES_MAX)
        .filter_map(|name| {
            let short = cut(name);
            let distance = wanted.iter().map(|want| strsim::levenshtein(want, &short)).min()?;
            Some((distance, name))
        })
        .collect();
    scored.sort_unstable();
    scored.into_iter().take(NEAREST_NAMES).map(|(_, name)| name.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_is_escaped_and_cut() {
        assert_eq!(quoted("a\u{1b}[2Jb\n"), "`a\\u{1b}[2Jb\\n`");
        assert_eq!(printable(&"x".repeat(1000)).chars().count(), SHOWN_CHARS_MAX + 1);
    }

    #[test]
    fn sizes_use_the_unit_people_read() {
        assert_eq!(size(999), "999 bytes");
        assert_eq!(size(1_500), "1.5 kB");
        assert_eq!(size(5_000_000_000), "5.0 GB");
    }

    #[test]
    fn nearest_names_come_first() {
        let have = ["h.0.attn.weight", "h.1.attn.weight", "wte.weight", "x", "y", "zzzzzzzzzzzzzzzzzzz"];
        let found = nearest(&["h.0.attn.wieght".to_owned()], have.into_iter());
        assert_eq!(found, have[..NEAREST_NAMES]);
    }
}
