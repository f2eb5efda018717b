//! What parts are called. Everything that must not be mixed up is in the name: the step, the number of the save, and
//! which part of how many. So a writer that was left behind by another attempt writes where nobody looks for it.

use std::fmt;

/// One part of one attempt to save one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PartName {
    pub(super) step: u64,
    /// Of the attempt. Later ones have greater numbers.
    pub(super) id: u64,
    pub(super) of: usize,
    /// From 1.
    pub(super) part: usize,
}

impl fmt::Display for PartName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PartName { step, id, of, part } = self;
        write!(formatter, "step-{step:08}-save-{id}-part-{part}-of-{of}")
    }
}

impl PartName {
    /// Names that are not just as we give them are none of ours.
    pub(super) fn parse(name: &str) -> Option<PartName> {
        let (step, rest) = name.strip_prefix("step-")?.split_once("-save-")?;
        let (id, rest) = rest.split_once("-part-")?;
        let (part, of) = rest.split_once("-of-")?;
        let found = PartName {
            step: step.parse().ok()?,
            id: id.parse().ok()?,
            of: of.parse().ok()?,
            part: part.parse().ok()?,
        };
        ((1..=found.of).contains(&found.part) && found.to_string() == name).then_some(found)
    }

    /// The folders of format 1: `step-N` is all of a checkpoint. `step-N.replaced` is the older of two, which counts
    /// where the newer did not get its name; it was saved before, so its number is the smaller.
    pub(super) fn parse_format_1(name: &str) -> Option<PartName> {
        let (step, set_aside) = match name.strip_suffix(".replaced") {
            Some(step) => (step, true),
            None => (name, false),
        };
        let number: u64 = step.strip_prefix("step-")?.parse().ok()?;
        let id = if set_aside { FORMAT_1_SET_ASIDE } else { FORMAT_1 };
        (format!("step-{number:08}") == step).then_some(PartName { step: number, id, of: 1, part: 1 })
    }
}

/// The numbers of saves that had none. New saves count from [`FIRST_ID`].
const FORMAT_1_SET_ASIDE: u64 = 0;
pub(super) const FORMAT_1: u64 = 1;
pub(super) const FIRST_ID: u64 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written_and_no_others() {
        let name = PartName { step: 100, id: 7, of: 12, part: 3 };
        assert_eq!(name.to_string(), "step-00000100-save-7-part-3-of-12");
        assert_eq!(PartName::parse(&name.to_string()), Some(name));
        for other in [
            "step-100-save-7-part-3-of-12",
            "step-00000100-save-07-part-3-of-12",
            "step-00000100-save-7-part-0-of-12",
            "step-00000100-save-7-part-13-of-12",
            "step-00000100-save-7-part-3-of-12.partial",
            "step-00000100",
            "mine",
        ] {
            assert_eq!(PartName::parse(other), None, "{other}");
        }
        let old = PartName::parse_format_1("step-00000100").expect("a folder of format 1");
        let older = PartName::parse_format_1("step-00000100.replaced").expect("set aside");
        assert!(older < old && old.id < FIRST_ID && old.step == 100);
        assert_eq!(PartName::parse_format_1("step-100"), None);
    }
}
