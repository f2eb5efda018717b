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

    /// The folders of format 1: `step-N` is all of a checkpoint.
    pub(super) fn parse_format_1(name: &str) -> Option<PartName> {
        let step = name.strip_prefix("step-")?.parse().ok()?;
        (format!("step-{step:08}") == name).then_some(PartName { step, id: FORMAT_1_ID, of: 1, part: 1 })
    }
}

/// The number of saves that had none. New ones count from 1.
pub(super) const FORMAT_1_ID: u64 = 0;

/// How format 1 called the older of two saves of a step while the newer moved in.
pub(crate) const REPLACED: &str = ".replaced";

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
        let old = PartName::parse_format_1("step-00000100");
        assert_eq!(old, Some(PartName { step: 100, id: 0, of: 1, part: 1 }));
        assert_eq!(PartName::parse_format_1("step-100"), None);
    }
}
