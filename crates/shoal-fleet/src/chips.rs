//! Devices that are parts of one chip: shares of a GPU, workers on one processor. They have caches, memory and power in common,
//! so that each is quicker while the others rest than beside them. A profile holds what layers take beside all the others,
//! and what share of that they take alone.

use crate::fleet::Fleet;

/// A device's place on a chip that others may be parts of too.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seat {
    /// Which chip.
    pub chip: usize,
    /// How much of it the device is, beside its neighbours' parts.
    pub part: f64,
    /// What a layer takes while all neighbours rest, or where there are none, as a share of what it takes while all compute.
    pub alone: f64,
}

/// What a device is a part of, where others may be too.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Part<'a> {
    pub whole: &'a str,
    /// Hundredths of the chip; a processor has room for any number of workers.
    pub percent: Option<u32>,
    pub alone: f64,
}

/// How far nodes lie apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Apart {
    /// Each is a machine of its own.
    Machines,
    /// All are played on one machine.
    InABox,
}

/// A chip that is being dealt out.
struct Chip<'a> {
    node: Option<usize>,
    whole: &'a str,
    percent_taken: u32,
    members: Vec<usize>,
}

impl Chip<'_> {
    fn has_room(&self, node: Option<usize>, part: &Part) -> bool {
        let fits = part.percent.is_none_or(|percent| self.percent_taken + percent <= 100);
        self.node == node && self.whole == part.whole && fits
    }
}

/// By device, where it is a part of something. A node's parts of a kind fill one chip after the other.
pub(crate) fn seats<'a>(
    fleet: &Fleet,
    apart: Apart,
    part_of: impl Fn(usize) -> Option<Part<'a>>,
) -> Vec<Option<Seat>> {
    let mut chips: Vec<Chip> = Vec::new();
    let parts: Vec<Option<Part>> = (0..fleet.devices.len()).map(part_of).collect();
    for (device, part) in parts.iter().enumerate() {
        let Some(part) = part else { continue };
        let node = (apart == Apart::Machines).then_some(fleet.devices[device].node);
        let place = chips.iter().position(|chip| chip.has_room(node, part)).unwrap_or_else(|| {
            chips.push(Chip { node, whole: part.whole, percent_taken: 0, members: Vec::new() });
            chips.len() - 1
        });
        chips[place].percent_taken += part.percent.unwrap_or(0);
        chips[place].members.push(device);
    }
    let mut seats = vec![None; parts.len()];
    for (number, chip) in chips.iter().enumerate() {
        for member in &chip.members {
            let Some(Part { percent, alone, .. }) = parts[*member] else { continue };
            seats[*member] = Some(Seat { chip: number, part: f64::from(percent.unwrap_or(1)), alone });
        }
    }
    seats
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet() -> Fleet {
        let text = "[[node]]\nname = \"a\"\nhost_memory = \"64 GiB\"\nnetwork = \"1 Gbit/s\"\n\
            devices = [{ kind = \"H200\", share = 0.5, count = 4 }, { kind = \"V100\" }]\n\
            [[node]]\nname = \"b\"\nhost_memory = \"64 GiB\"\nnetwork = \"1 Gbit/s\"\n\
            devices = [{ kind = \"CPU\", memory = \"1 GiB\", count = 3 }, { kind = \"H200\", share = 0.2 }]\n";
        Fleet::parse(text, "fleet").unwrap()
    }

    fn chips_of(apart: Apart) -> Vec<Option<usize>> {
        let (fleet, alone) = (fleet(), 0.8);
        let part_of = |device: usize| match device {
            0..=3 => Some(Part { whole: "H200", percent: Some(50), alone }),
            5..=7 => Some(Part { whole: "CPU", percent: None, alone }),
            8 => Some(Part { whole: "H200", percent: Some(20), alone }),
            _ => None,
        };
        let seats = seats(&fleet, apart, part_of);
        seats.into_iter().map(|seat| seat.map(|seat| seat.chip)).collect()
    }

    #[test]
    fn parts_fill_one_chip_after_the_other_and_processors_hold_all_their_workers() {
        let chips = [Some(0), Some(0), Some(1), Some(1), None, Some(2), Some(2), Some(2), Some(3)];
        assert_eq!(chips_of(Apart::Machines), chips);
        // In a box the fifth share is of a third GPU, and alone there all the same.
        assert_eq!(chips_of(Apart::InABox), chips);
    }

    #[test]
    fn machines_that_are_played_in_a_box_share_its_chips() {
        let node = |name: &str, share: &str| {
            format!(
                "[[node]]\nname = \"{name}\"\nhost_memory = \"64 GiB\"\nnetwork = \"1 Gbit/s\"\n\
                 devices = [{{ kind = \"H200\", share = {share} }}]\n"
            )
        };
        let text = ["a", "b", "c"].map(|name| node(name, "0.25")).concat();
        let fleet = Fleet::parse(&text, "fleet").unwrap();
        let part_of = |_| Some(Part { whole: "H200", percent: Some(25), alone: 0.8 });
        let on = |chip: usize| Some(Seat { chip, part: 25.0, alone: 0.8 });
        assert_eq!(seats(&fleet, Apart::Machines, part_of), [on(0), on(1), on(2)]);
        assert_eq!(seats(&fleet, Apart::InABox, part_of), [on(0); 3]);
    }
}
