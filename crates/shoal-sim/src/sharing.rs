//! Computing on chips that several devices share: whoever computes is slower by as much of its chip as computes beside it. Whenever
//! one of them begins or ends, the ends of the others move.

use shoal_fleet::Seat;

/// When a device will have computed what it is at, as it is foreseen now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Turn {
    pub at: f64,
    pub device: usize,
    /// Ends that were foreseen before it changed are void.
    version: u64,
}

/// By device, where any of them is quicker while others of its chip rest.
pub(crate) struct Sharing {
    seats: Vec<Option<Seat>>,
    /// The devices of each chip.
    chips: Vec<Vec<usize>>,
    under_way: Vec<Option<Computing>>,
    versions: Vec<u64>,
}

/// What a device computes.
#[derive(Clone, Copy)]
struct Computing {
    /// Seconds that are left of it beside neighbours that all compute.
    left: f64,
    /// As of when.
    since: f64,
    /// Seconds that one of those takes now.
    slowness: f64,
    /// Whether it is quicker while neighbours rest.
    yields: bool,
}

impl Computing {
    /// As of now, at another slowness.
    fn go_on(&mut self, now: f64, slowness: f64) {
        self.left = (self.left - (now - self.since) / self.slowness).max(0.0);
        (self.since, self.slowness) = (now, slowness);
    }
}

impl Sharing {
    /// None where nobody does.
    pub(crate) fn new(seats: Vec<Option<Seat>>) -> Option<Sharing> {
        let sharing = seats.iter().flatten();
        let count = sharing.clone().map(|seat| seat.chip + 1).max()?;
        if sharing.into_iter().all(|seat| seat.alone >= 1.0) {
            return None;
        }
        let mut chips = vec![Vec::new(); count];
        for (device, seat) in seats.iter().enumerate() {
            if let Some(seat) = seat {
                chips[seat.chip].push(device);
            }
        }
        let devices = seats.len();
        Some(Sharing { seats, chips, under_way: vec![None; devices], versions: vec![0; devices] })
    }

    pub(crate) fn is_shared(&self, device: usize) -> bool {
        self.seats[device].is_some()
    }

    /// A device begins to compute something that takes so long beside neighbours that all compute. The ends that change are given
    /// to `foresee`, its own among them.
    pub(crate) fn begin(
        &mut self,
        device: usize,
        seconds: f64,
        yields: bool,
        now: f64,
        foresee: &mut impl FnMut(Turn),
    ) {
        self.under_way[device] = Some(Computing { left: seconds, since: now, slowness: 1.0, yields });
        self.foresee_anew(device, now, foresee);
    }

    /// Whether an end that was foreseen has come; then others are quicker.
    pub(crate) fn end(&mut self, turn: Turn, foresee: &mut impl FnMut(Turn)) -> bool {
        if self.versions[turn.device] != turn.version || self.under_way[turn.device].is_none() {
            return false;
        }
        self.under_way[turn.device] = None;
        self.foresee_anew(turn.device, turn.at, foresee);
        true
    }

    /// All ends on a device's chip.
    fn foresee_anew(&mut self, changed: usize, now: f64, foresee: &mut impl FnMut(Turn)) {
        let Some(Seat { chip, .. }) = self.seats[changed] else { return };
        for place in 0..self.chips[chip].len() {
            let device = self.chips[chip][place];
            let slowness = self.slowness(device);
            let Some(computing) = &mut self.under_way[device] else { continue };
            if computing.slowness == slowness && device != changed {
                continue;
            }
            computing.go_on(now, slowness);
            self.versions[device] += 1;
            foresee(Turn { at: now + computing.left * slowness, device, version: self.versions[device] });
        }
    }

    /// Seconds that one of a device takes, by how much of the rest of its chip computes.
    fn slowness(&self, device: usize) -> f64 {
        let (Some(seat), Some(Computing { yields: true, .. })) = (self.seats[device], self.under_way[device])
        else {
            return 1.0;
        };
        let (mut all, mut busy) = (0.0, 0.0);
        for other in self.chips[seat.chip].iter().filter(|other| **other != device) {
            let part = self.seats[*other].map_or(0.0, |seat| seat.part);
            all += part;
            busy += if self.under_way[*other].is_some() { part } else { 0.0 };
        }
        seat.alone + (1.0 - seat.alone) * if all > 0.0 { busy / all } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays computations through, each of a device from a moment on; returns when they ended.
    fn play(sharing: &mut Sharing, mut begins: Vec<(f64, usize, f64)>) -> Vec<f64> {
        let mut turns: Vec<Turn> = Vec::new();
        let mut ends = vec![f64::NAN; sharing.seats.len()];
        begins.sort_by(|a, b| b.0.total_cmp(&a.0));
        loop {
            turns.sort_by(|a, b| b.at.total_cmp(&a.at));
            let begin = begins.last().map_or(f64::INFINITY, |begin| begin.0);
            match turns.last().copied().filter(|turn| turn.at <= begin) {
                Some(turn) => {
                    turns.pop();
                    if sharing.end(turn, &mut |turn| turns.push(turn)) {
                        ends[turn.device] = turn.at;
                    }
                }
                None => match begins.pop() {
                    None => return ends,
                    Some((now, device, seconds)) => {
                        sharing.begin(device, seconds, true, now, &mut |turn| turns.push(turn));
                    }
                },
            }
        }
    }

    fn seat(part: f64, alone: f64) -> Option<Seat> {
        Some(Seat { chip: 0, part, alone })
    }

    #[test]
    fn two_on_one_core_take_turns() {
        assert!(Sharing::new(vec![None, None]).is_none());
        assert!(Sharing::new(vec![seat(1.0, 1.0); 2]).is_none());
        let mut sharing = Sharing::new(vec![seat(1.0, 0.5), seat(1.0, 0.5), None]).unwrap();
        assert!(sharing.is_shared(1) && !sharing.is_shared(2));
        // The first has the core to itself for a second, in which it does two of its six; then both take turns until the
        // second's two are over, and the last two take one.
        assert_eq!(play(&mut sharing, vec![(0.0, 0, 6.0), (1.0, 1, 2.0)])[..2], [4.0, 3.0]);
        // Nothing of it is left. Who has no neighbours is as quick as beside those that rest.
        assert_eq!(play(&mut sharing, vec![(5.0, 1, 2.0)])[1], 6.0);
        let mut sharing = Sharing::new(vec![seat(1.0, 0.5)]).unwrap();
        assert_eq!(play(&mut sharing, vec![(0.0, 0, 2.0)]), [1.0]);
    }

    #[test]
    fn parts_count_by_their_size_and_nobody_is_hurt_who_has_the_rest_to_itself() {
        // 40, 30, 20 and 10 hundredths; only the last is quicker alone.
        let seats =
            [(40.0, 1.0), (30.0, 1.0), (20.0, 1.0), (10.0, 0.7)].map(|(part, alone)| seat(part, alone));
        let mut sharing = Sharing::new(seats.to_vec()).unwrap();
        let ends = play(&mut sharing, vec![(0.0, 0, 1.0), (0.0, 1, 2.0), (0.0, 2, 3.0), (0.0, 3, 10.0)]);
        assert_eq!(ends[..3], [1.0, 2.0, 3.0]);
        // A second beside all, one beside five ninths, one beside two ninths, and the rest alone.
        let done = 1.0 + 1.0 / (0.7 + 0.3 * 5.0 / 9.0) + 1.0 / (0.7 + 0.3 * 2.0 / 9.0);
        assert!((ends[3] - (3.0 + 0.7 * (10.0 - done))).abs() < 1e-9, "{ends:?}");
    }
}
