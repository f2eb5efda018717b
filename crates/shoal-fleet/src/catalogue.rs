//! Common devices by their makers' public figures: what an unmeasured kind is estimated from, and what a fleet file
//! may leave out.

use shoal_model::Precision;

use crate::link::Link;

/// The kind of a device that is a processor.
pub const CPU: &str = "CPU";

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kind {
    pub name: &'static str,
    /// What else it is called, as [`key`] writes it.
    aliases: &'static [&'static str],
    /// As its driver counts them, a little less than on the box; a processor has its host's.
    pub memory_bytes: Option<u64>,
    /// Dense products of fp16 or bf16 that are summed in fp32, in operations per second.
    pub half_flops: f64,
    /// Dense products of TF32, where there are units for them.
    pub tf32_flops: Option<f64>,
    pub fp32_flops: f64,
    pub has_bf16: bool,
    pub memory_bytes_per_second: f64,
    /// Of its sixteen lanes to the host; a processor needs none.
    pub pcie_generation: Option<u32>,
}

const TERA: f64 = 1e12;
const GIGA: f64 = 1e9;

/// A GPU: name, what else it is called, MiB, TFLOP/s (halves, TF32, fp32), bf16, GB/s, PCIe generation.
const fn gpu(
    name: &'static str,
    aliases: &'static [&'static str],
    mebibytes: u64,
    (half, tf32, fp32): (f64, Option<f64>, f64),
    has_bf16: bool,
    gigabytes_per_second: f64,
    pcie_generation: u32,
) -> Kind {
    Kind {
        name,
        aliases,
        memory_bytes: Some(mebibytes << 20),
        half_flops: half * TERA,
        tf32_flops: match tf32 {
            Some(rate) => Some(rate * TERA),
            None => None,
        },
        fp32_flops: fp32 * TERA,
        has_bf16,
        memory_bytes_per_second: gigabytes_per_second * GIGA,
        pcie_generation: Some(pcie_generation),
    }
}

/// Every kind that is known.
#[rustfmt::skip]
pub const KINDS: &[Kind] = &[
    // Held at 70 W, a T4 is far from its maker's 65 and 8.1 TFLOP/s whenever it works for longer than a moment (NVIDIA's
    // own forum: about 24 for one large product after another). Transformer layers on it, forward and backward, come to
    // 18.8 in halves (median of 21 profiles that Cephalo published, 4.3 to 22.4) and 3.9 in fp32 (9 profiles, 3.3 to 4.4);
    // these rates are those of which estimates take their usual share.
    gpu("T4", &[], 15360, (37.6, None, 5.6), false, 320.0, 3),
    // No units for products of halves: they are turned to fp32 first.
    gpu("P40", &[], 22919, (11.8, None, 11.8), false, 347.0, 3),
    gpu("P100", &["p10016", "p100pcie16", "p100sxm216"], 16280, (18.7, None, 9.3), false, 732.0, 3),
    gpu("V100-16", &["v100", "v100sxm216", "v100pcie16"], 16160, (125.0, None, 15.7), false, 900.0, 3),
    gpu("V100-32", &["v100sxm232", "v100sxm332", "v100pcie32"], 32510, (125.0, None, 15.7), false, 900.0, 3),
    gpu("RTX 2080 Ti", &["2080"], 11264, (53.8, None, 13.4), false, 616.0, 3),
    gpu("Titan RTX", &[], 24220, (130.5, None, 16.3), false, 672.0, 3),
    // The same of an L4 at 72 W, whose maker says 121 and 30.3: 37.3 in halves (23 profiles) and 7.1 in fp32 (13). TF32, of
    // which there is no profile, is taken as half of halves, as the maker has it.
    gpu("L4", &[], 23034, (74.6, Some(37.3), 10.1), true, 300.0, 4),
    gpu("A10", &["a1024"], 23028, (125.0, Some(62.5), 31.2), true, 600.0, 4),
    gpu("A10G", &["a10g24"], 23028, (70.0, Some(35.0), 35.0), true, 600.0, 4),
    gpu("A6000", &["a600048"], 49140, (154.8, Some(77.4), 38.7), true, 768.0, 4),
    gpu("RTX 3090", &["309024"], 24576, (71.0, Some(35.6), 35.6), true, 936.0, 4),
    gpu("RTX 4090", &["409024"], 24564, (165.2, Some(82.6), 82.6), true, 1008.0, 4),
    gpu("L40S", &["l40s48"], 46068, (362.0, Some(183.0), 91.6), true, 864.0, 4),
    gpu("A100-40", &["a100", "a100sxm440", "a100pcie40", "a100x40"], 40960, (312.0, Some(156.0), 19.5), true, 1555.0, 4),
    gpu("A100-80", &["a100sxm480", "a10080pcie", "a100pcie80", "a100x80"], 81920, (312.0, Some(156.0), 19.5), true, 2039.0, 4),
    gpu("H100", &["h10080", "h10080hbm3", "h100sxm", "h100sxm5", "h100sxm580"], 81559, (989.0, Some(495.0), 67.0), true, 3350.0, 5),
    gpu("H100 PCIe", &["h100pcie80", "h10080pcie"], 81559, (756.0, Some(378.0), 51.0), true, 2000.0, 5),
    gpu("H100 NVL", &["h100nvl94"], 95830, (835.0, Some(417.0), 60.0), true, 3900.0, 5),
    gpu("GH200", &["gh20096", "gh96", "gh200480"], 97871, (989.0, Some(495.0), 67.0), true, 4000.0, 5),
    gpu("H200", &["h200141", "h200sxm", "h200sxm141"], 143771, (989.0, Some(495.0), 67.0), true, 4800.0, 5),
    // Sixteen cores of a server with 256-bit vectors and eight channels of DDR4, of which it has a half.
    Kind {
        name: CPU,
        aliases: &["processor", "host"],
        memory_bytes: None,
        half_flops: 1.5 * TERA,
        tf32_flops: None,
        fp32_flops: 1.5 * TERA,
        has_bf16: false,
        memory_bytes_per_second: 100.0 * GIGA,
        pcie_generation: None,
    },
];

/// A name without what varies between those who write it: case, punctuation, the maker's and the series' name, and
/// units of memory.
pub fn key(name: &str) -> String {
    let words = name.split(|c: char| !c.is_ascii_alphanumeric()).map(str::to_ascii_lowercase);
    let bare = words.map(|word| {
        let word = ["gb", "gib", "g"].iter().find_map(|unit| number_of(&word, unit)).unwrap_or(&word);
        word.strip_prefix("rtx").unwrap_or(word).to_owned()
    });
    let said =
        |word: &String| !matches!(word.as_str(), "nvidia" | "tesla" | "geforce" | "quadro" | "gb" | "gib");
    bare.filter(said).collect()
}

/// The digits before the unit, where the word is nothing else.
fn number_of<'a>(word: &'a str, unit: &str) -> Option<&'a str> {
    let digits = word.strip_suffix(unit)?;
    (!digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())).then_some(digits)
}

/// The kind of that name, however it is written.
pub fn find(name: &str) -> Option<&'static Kind> {
    let wanted = key(name);
    KINDS.iter().find(|kind| key(kind.name) == wanted || kind.aliases.contains(&wanted.as_str()))
}

/// The kind whose name is closest, if any is close.
pub fn nearest(name: &str) -> Option<&'static str> {
    let wanted = key(name);
    let likeness = |kind: &'static Kind| {
        let names = kind.aliases.iter().map(|alias| alias.to_string()).chain([key(kind.name)]);
        names.map(|known| strsim::jaro_winkler(&wanted, &known)).fold(0.0, f64::max)
    };
    KINDS
        .iter()
        .map(|kind| (likeness(kind), kind.name))
        .filter(|(likeness, _)| *likeness > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name)
}

/// The catalogue's name of a kind; as it is where the catalogue does not know it.
pub fn name(kind: &str) -> String {
    find(kind).map_or_else(|| kind.trim().to_owned(), |known| known.name.to_owned())
}

/// The kind of a device that is a share of another: of so many hundredths of it.
pub fn share_name(percent: u32, whole: &str) -> String {
    format!("{percent} % of {}", name(whole))
}

/// The hundredths and the whole of a kind that is a share, as [`share_name`] names it.
pub fn share_of(kind: &str) -> Option<(u32, &str)> {
    let (percent, whole) = kind.split_once(" % of ")?;
    let percent = percent.parse().ok().filter(|percent| (1..=100).contains(percent))?;
    Some((percent, whole))
}

/// The part of the whole's rate that a share of its multiprocessors reaches. Matrix products on an H200 under NVIDIA's MPS
/// came to 0.26 of the whole's with a quarter and to 0.50 with a half: a small share is clocked a little higher.
pub fn share_rate(percent: u32) -> f64 {
    const MEASURED: [(f64, f64); 4] = [(0.0, 0.0), (0.25, 0.26), (0.5, 0.5), (1.0, 1.0)];
    let share = f64::from(percent.min(100)) / 100.0;
    let after = MEASURED.iter().position(|(known, _)| share <= *known).unwrap_or(3).max(1);
    let [(left, low), (right, high)] = [MEASURED[after - 1], MEASURED[after]];
    low + (high - low) * (share - left) / (right - left)
}

/// Whether two names mean one kind.
pub fn same(a: &str, b: &str) -> bool {
    a == b || key(&name(a)) == key(&name(b))
}

impl Kind {
    /// Operations per second of its matrix products, at their best.
    pub fn flops(&self, precision: Precision) -> f64 {
        match precision {
            Precision::Fp32 => self.fp32_flops,
            Precision::Tf32 => self.tf32_flops.unwrap_or(self.fp32_flops),
            Precision::Fp16 => self.half_flops,
            Precision::Bf16 if self.has_bf16 => self.half_flops,
            // Without units for it, its numbers are computed as fp32.
            Precision::Bf16 => self.fp32_flops,
        }
    }

    /// Each way between the device and its host.
    pub fn host_link(&self) -> Link {
        /// A copy's start, as drivers take.
        const LATENCY_SECONDS: f64 = 10e-6;
        // What large copies reach over sixteen lanes: about 12, 24 and 52 GB/s; each generation doubles.
        match self.pcie_generation {
            Some(5..) => Link::new(52.0 * GIGA, LATENCY_SECONDS),
            Some(4) => Link::new(24.0 * GIGA, LATENCY_SECONDS),
            Some(_) => Link::new(12.0 * GIGA, LATENCY_SECONDS),
            // Its memory is the host's: a copy reads and writes.
            None => Link::new(self.memory_bytes_per_second / 2.0, 0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_matched_however_they_are_written() {
        for (written, name) in [
            ("h200", "H200"),
            ("NVIDIA H200", "H200"),
            ("Tesla V100-SXM2-16GB", "V100-16"),
            ("V100", "V100-16"),
            ("v100_32", "V100-32"),
            ("V100 32 GB", "V100-32"),
            ("NVIDIA A100-SXM4-80GB", "A100-80"),
            ("A100 40GB", "A100-40"),
            ("NVIDIA A100 80GB PCIe", "A100-80"),
            ("NVIDIA H100 80GB HBM3", "H100"),
            ("NVIDIA H100 PCIe", "H100 PCIe"),
            ("NVIDIA GeForce RTX 3090", "RTX 3090"),
            ("rtx3090", "RTX 3090"),
            ("4090", "RTX 4090"),
            ("NVIDIA RTX A6000", "A6000"),
            ("NVIDIA A10G", "A10G"),
            ("TITAN RTX", "Titan RTX"),
            ("cpu", "CPU"),
        ] {
            assert_eq!(find(written).map(|kind| kind.name), Some(name), "{written}");
        }
        assert!(find("abacus").is_none());
        assert!(same("Tesla T4", "t4") && !same("T4", "L4") && same("my device", "My-Device"));
    }

    #[test]
    fn no_two_kinds_share_a_name() {
        let mut names: Vec<String> = KINDS
            .iter()
            .flat_map(|kind| kind.aliases.iter().map(|alias| alias.to_string()).chain([key(kind.name)]))
            .collect();
        names.sort();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
        // An alias that its own key differs from would never be found.
        assert!(names.iter().all(|name| key(name) == *name), "{names:?}");
    }

    #[test]
    fn shares_are_kinds_of_their_own() {
        let quarter = share_name(25, "NVIDIA H200");
        assert_eq!(quarter, "25 % of H200");
        assert_eq!(share_of(&quarter), Some((25, "H200")));
        assert!(find(&quarter).is_none() && !same(&quarter, "H200") && same(&quarter, "25 % of H200"));
        assert!(
            ["H200", "0 % of H200", "101 % of H200", "x % of H200"]
                .iter()
                .all(|kind| share_of(kind).is_none())
        );
        for (percent, rate) in [(25, 0.26), (50, 0.5), (100, 1.0), (75, 0.75), (10, 0.104)] {
            assert!((share_rate(percent) - rate).abs() < 1e-12, "{percent}: {}", share_rate(percent));
        }
    }

    #[test]
    fn figures_hang_together() {
        for kind in KINDS {
            assert!(kind.half_flops >= kind.fp32_flops, "{}", kind.name);
            // Between 10 and 800 operations a byte: anything else is a slipped unit.
            let intensity = kind.half_flops / kind.memory_bytes_per_second;
            assert!((10.0..800.0).contains(&intensity), "{}: {intensity}", kind.name);
            assert!(kind.memory_bytes.is_none_or(|bytes| (10 << 30..160 << 30).contains(&bytes)));
            assert_eq!(kind.tf32_flops.is_some(), kind.has_bf16, "{}: both came with Ampere", kind.name);
        }
    }

    #[test]
    fn the_documented_table_is_this_one() {
        let documented = include_str!("../../../docs/fleet.md");
        for kind in KINDS.iter().filter(|kind| kind.pcie_generation.is_some()) {
            let tf32 = kind.tf32_flops.map_or(String::new(), |rate| (rate / TERA).to_string());
            let row = [
                kind.name.to_owned(),
                (kind.memory_bytes.unwrap_or(0) >> 20).to_string(),
                (kind.half_flops / TERA).to_string(),
                tf32,
                (kind.fp32_flops / TERA).to_string(),
                (kind.memory_bytes_per_second / GIGA).to_string(),
                kind.pcie_generation.unwrap_or(0).to_string(),
            ];
            let row = format!("| {} |", row.join(" | "));
            assert!(documented.contains(&row), "{row}");
        }
    }

    #[test]
    fn a_misspelt_kind_has_a_nearest() {
        assert_eq!(nearest("V10O-32"), Some("V100-32"));
        assert_eq!(nearest("RTX 309"), Some("RTX 3090"));
        assert_eq!(nearest("zzz"), None);
    }

    #[test]
    fn rates_go_by_what_the_device_has() {
        let v100 = find("V100").unwrap();
        assert_eq!(v100.flops(Precision::Fp16), 125e12);
        assert_eq!(v100.flops(Precision::Bf16), 15.7e12);
        assert_eq!(v100.flops(Precision::Tf32), 15.7e12);
        assert_eq!(find("A100").unwrap().flops(Precision::Tf32), 156e12);
        assert_eq!(find("H200").unwrap().host_link().bytes_per_second, 52e9);
    }
}
