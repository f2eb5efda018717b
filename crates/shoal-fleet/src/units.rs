//! Sizes, rates and times as people write them. What is wrong follows the key's name in a message.

type Parsed<T> = Result<T, String>;

pub(crate) const SIZE_HINT: &str = "write a size such as \"16 GiB\" or \"800 MB\"";
pub(crate) const RATE_HINT: &str = "write a rate such as \"10 Gbit/s\" or \"12 GB/s\"";
pub(crate) const TIME_HINT: &str = "write a time such as \"50 us\" or \"1 ms\"";

/// `16 GiB`, `800MB`.
pub(crate) fn bytes(text: &str) -> Parsed<u64> {
    let unclear = || format!("is \"{text}\", which is no size");
    let (number, unit) = split(text).ok_or_else(unclear)?;
    let bytes = number * byte_scale(&unit.to_ascii_lowercase()).ok_or_else(unclear)?;
    // A petabyte and more is a slip.
    if !(1.0..=(1u64 << 50) as f64).contains(&bytes) {
        return Err(format!("is \"{text}\", which is no sensible size"));
    }
    Ok(bytes.round() as u64)
}

/// Bytes per second: `10 Gbit/s`, `12 GB/s`, `100 Gbps`.
pub(crate) fn bytes_per_second(text: &str) -> Parsed<f64> {
    let unclear = || format!("is \"{text}\", which is no rate");
    let (number, unit) = split(text).ok_or_else(unclear)?;
    let lower = unit.to_ascii_lowercase();
    let scale = if let Some(bits) = lower.strip_suffix("bit/s").or_else(|| lower.strip_suffix("bps")) {
        decimal(bits).map(|scale| scale / 8.0)
    } else if unit.ends_with("b/s") {
        // Bits to some and bytes to others: eight times the one or an eighth of the other.
        return Err(format!("is \"{text}\": a small b may mean bits or bytes"));
    } else {
        lower.strip_suffix("/s").and_then(byte_scale)
    };
    match number * scale.ok_or_else(unclear)? {
        rate if rate > 0.0 && rate.is_finite() => Ok(rate),
        _ => Err(format!("is \"{text}\", which moves nothing")),
    }
}

/// `50 us`, `1 ms`, `0 s`.
pub(crate) fn seconds(text: &str) -> Parsed<f64> {
    let unclear = || format!("is \"{text}\", which is no time");
    let (number, unit) = split(text).ok_or_else(unclear)?;
    let scale = match unit {
        "ns" => 1e-9,
        "us" | "µs" | "μs" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ => return Err(unclear()),
    };
    Ok(number * scale)
}

/// A number without a sign, and what follows it.
fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    Some((text[..end].parse().ok()?, text[end..].trim()))
}

fn byte_scale(unit: &str) -> Option<f64> {
    if let Some(prefix) = unit.strip_suffix("ib") {
        let power = ["k", "m", "g", "t"].iter().position(|known| *known == prefix)?;
        return Some(1024.0f64.powi(power as i32 + 1));
    }
    decimal(unit.strip_suffix('b')?)
}

fn decimal(prefix: &str) -> Option<f64> {
    let power = ["", "k", "m", "g", "t"].iter().position(|known| *known == prefix)?;
    Some(1e3f64.powi(power as i32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_rates_and_times_read_as_people_write_them() {
        assert_eq!(bytes("16 GiB"), Ok(16 << 30));
        assert_eq!(bytes("1.5gib"), Ok(3 << 29));
        assert_eq!(bytes("800MB"), Ok(800_000_000));
        assert_eq!(bytes("512 B"), Ok(512));
        assert_eq!(bytes_per_second("10 Gbit/s"), Ok(1.25e9));
        assert_eq!(bytes_per_second("100 Gbps"), Ok(12.5e9));
        assert_eq!(bytes_per_second("12 GB/s"), Ok(12e9));
        assert_eq!(bytes_per_second("1 MiB/s"), Ok(1_048_576.0));
        assert_eq!(seconds("50 us"), Ok(50.0 * 1e-6));
        assert_eq!(seconds("50µs"), Ok(50.0 * 1e-6));
        assert_eq!(seconds("1 ms"), Ok(1e-3));
        assert_eq!(seconds("0 s"), Ok(0.0));
    }

    #[test]
    fn what_is_no_quantity_is_refused() {
        for wrong in ["", "16", "GiB", "-1 GB", "1.2.3 GB", "0 GB", "5 apples", "9000 TiB", "16 GB/s"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
        for wrong in ["", "10", "10 GB", "0 GB/s", "fast", "10 Gb/s", "-1 GB/s"] {
            assert!(bytes_per_second(wrong).is_err(), "{wrong}");
        }
        assert!(bytes_per_second("10 Gb/s").is_err_and(|what| what.contains("bits or bytes")));
        for wrong in ["", "5", "5 min", "soon", "-1 s"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
