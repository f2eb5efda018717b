//! Intervals and sizes as people write them.

use std::time::Duration;

use shoal_engine::Interval;

/// `100 steps`, `30s`, `5m`, `2h` or `auto`; otherwise what is wrong, to follow the key's name.
pub(super) fn interval(text: &str) -> Result<Interval, String> {
    let text = text.trim();
    if text == "auto" {
        return Ok(Interval::Auto);
    }
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = (&text[..split], text[split..].trim());
    let unclear = || format!("is \"{text}\", which is no interval");
    if matches!(unit, "step" | "steps") {
        return match number.parse() {
            Ok(0) => Err("is 0 steps".into()),
            Ok(steps) => Ok(Interval::Steps(steps)),
            Err(_) => Err(unclear()),
        };
    }
    let scale = match unit {
        "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(unclear()),
    };
    let seconds = number.parse::<f64>().map_err(|_| unclear())? * scale;
    if seconds <= 0.0 || !seconds.is_finite() {
        return Err(format!("is \"{text}\", which is no time"));
    }
    Ok(Interval::Time(Duration::from_secs_f64(seconds)))
}

/// `512MiB`, `4GiB`, `8GB`, `1000000`; otherwise what is wrong.
pub fn bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let unclear = || format!("is \"{text}\", which is no size");
    let number: f64 = text[..split].parse().map_err(|_| unclear())?;
    let scale = match text[split..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kib" | "k" => 1024.0,
        "mib" | "m" => 1024.0f64.powi(2),
        "gib" | "g" => 1024.0f64.powi(3),
        "tib" | "t" => 1024.0f64.powi(4),
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        _ => return Err(unclear()),
    };
    let bytes = number * scale;
    if !(1.0..=(1u64 << 50) as f64).contains(&bytes) {
        return Err(format!("is \"{text}\", which is no sensible size"));
    }
    Ok(bytes as u64)
}

/// Bytes in the unit that reads best.
pub fn bytes_text(bytes: u64) -> String {
    let value = bytes as f64;
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.0} KiB", value / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.0} MiB", value / 1_048_576.0),
        _ => format!("{:.2} GiB", value / 1_073_741_824.0),
    }
}

/// Seconds as `45s`, `3m12s` or `5h02m`.
pub fn duration_text(seconds: f64) -> String {
    if !seconds.is_finite() {
        return "?".into();
    }
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{whole}s"),
        60..3600 => format!("{}m{:02}s", whole / 60, whole % 60),
        _ => format!("{}h{:02}m", whole / 3600, whole % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_and_sizes_read_as_people_write_them() {
        assert_eq!(interval("100 steps"), Ok(Interval::Steps(100)));
        assert_eq!(interval("1 step"), Ok(Interval::Steps(1)));
        assert_eq!(interval("5m"), Ok(Interval::Time(Duration::from_secs(300))));
        assert_eq!(interval("0.5h"), Ok(Interval::Time(Duration::from_secs(1800))));
        assert_eq!(interval("auto"), Ok(Interval::Auto));
        for wrong in ["", "5", "steps", "0 steps", "1.5 steps", "-1s", "0s", "5 parsecs"] {
            assert!(interval(wrong).is_err(), "{wrong}");
        }
        assert_eq!(bytes("512MiB"), Ok(512 << 20));
        assert_eq!(bytes("1.5 GiB"), Ok(3 << 29));
        assert_eq!(bytes("8GB"), Ok(8_000_000_000));
        for wrong in ["", "lots", "-1GB", "0", "1e99GB", "5 apples"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
