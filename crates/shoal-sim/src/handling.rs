//! What messages take of those who compute. A GPU's messages are handled by its host; a processor copies, adds and sends them by
//! the cores that compute. Whatever it computes meanwhile lasts longer, and so do the messages: who handles them and who computes
//! have the core in turns, and a message waits for its turn.

use std::collections::HashMap;

use shoal_fleet::costs;

use crate::world::Work;

/// By device, where any of them handles messages itself.
pub(crate) struct Handling {
    of: Vec<costs::Handling>,
    computing: Vec<Computing>,
    /// What was taken of computing that was under way: the next instruction that computes lasts longer by so much.
    owed_seconds: Vec<f64>,
    /// When each movement began, and for how long its devices had computed by then.
    begun: HashMap<usize, (f64, Vec<f64>)>,
}

/// For how long a device has computed.
#[derive(Clone, Copy, Default)]
struct Computing {
    seconds: f64,
    since: Option<f64>,
}

impl Computing {
    fn seconds(self, now: f64) -> f64 {
        self.seconds + self.since.map_or(0.0, |since| now - since)
    }
}

impl Handling {
    /// None where nobody does.
    pub(crate) fn new(of: Vec<costs::Handling>) -> Option<Handling> {
        let devices = of.len();
        of.iter().any(|one| *one != costs::Handling::default()).then(|| Handling {
            of,
            computing: vec![Computing::default(); devices],
            owed_seconds: vec![0.0; devices],
            begun: HashMap::new(),
        })
    }

    /// A device begins to compute something; returns by how much longer that lasts.
    pub(crate) fn compute(&mut self, device: usize, now: f64) -> f64 {
        self.computing[device].since = Some(now);
        std::mem::take(&mut self.owed_seconds[device])
    }

    pub(crate) fn computed(&mut self, device: usize, now: f64) {
        let computing = &mut self.computing[device];
        *computing = Computing { seconds: computing.seconds(now), since: None };
    }

    pub(crate) fn begin(&mut self, movement: usize, devices: impl Iterator<Item = usize>, now: f64) {
        let computed = devices.map(|device| self.computing[device].seconds(now)).collect();
        self.begun.insert(movement, (now, computed));
    }

    /// The last byte of a movement has passed, with so much for each of the same devices to handle. That was done all the time that
    /// the movement took; what of it fell where a device computed is taken of that. Returns when the movement is over, if
    /// handling takes longer than its bytes did; it is asked once.
    pub(crate) fn end(
        &mut self,
        movement: usize,
        devices: impl Iterator<Item = usize>,
        work: &Work,
        now: f64,
    ) -> Option<f64> {
        let (began, computed) = self.begun.remove(&movement)?;
        let lasted = now - began;
        if lasted <= 0.0 {
            return None;
        }
        let mut over = now;
        for (device, before) in devices.zip(computed) {
            let share = (self.computing[device].seconds(now) - before) / lasted;
            let costs::Handling { seconds_per_byte, seconds_per_message } = self.of[device];
            let handling = work.handled_bytes * seconds_per_byte;
            self.owed_seconds[device] += share * handling;
            let handled = now.max(began + (1.0 + share) * handling);
            over = over.max(handled + share * work.handled_messages * seconds_per_message);
        }
        (over > now).then_some(over)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_handled_while_a_device_computes_makes_it_slower_and_the_rest_does_not() {
        let by_byte = |seconds_per_byte| costs::Handling { seconds_per_byte, ..costs::Handling::default() };
        let bytes = |handled_bytes| Work { handled_bytes, handled_messages: 1.0, ..Work::default() };
        assert!(Handling::new(vec![by_byte(0.0); 3]).is_none());
        let mut handling = Handling::new(vec![by_byte(0.01), by_byte(0.0)]).unwrap();
        assert_eq!(handling.compute(0, 1.0), 0.0);
        handling.begin(7, [0, 1].into_iter(), 2.0);
        // The first computes for half of the movement's time.
        handling.computed(0, 4.0);
        assert_eq!(handling.end(7, [0, 1].into_iter(), &bytes(100.0), 6.0), None);
        assert_eq!(handling.compute(1, 6.0), 0.0);
        assert!((handling.compute(0, 6.0) - 0.5).abs() < 1e-12);
        // Once.
        handling.computed(0, 7.0);
        assert_eq!(handling.compute(0, 7.0), 0.0);
        handling.computed(0, 8.0);
        // One that waits handles in its own time.
        handling.begin(8, [0].into_iter(), 8.0);
        assert_eq!(handling.end(8, [0].into_iter(), &bytes(100.0), 9.0), None);
        assert_eq!(handling.compute(0, 9.0), 0.0);
        // Beside computing it has every second turn: three seconds of handling take six.
        handling.begin(9, [0].into_iter(), 10.0);
        assert_eq!(handling.end(9, [0].into_iter(), &bytes(300.0), 12.0), Some(16.0));
        assert_eq!(handling.end(9, [0].into_iter(), &bytes(300.0), 16.0), None);
    }
    #[test]
    fn a_message_waits_where_a_device_computes_and_not_where_it_waits_too() {
        let one = costs::Handling { seconds_per_byte: 0.0, seconds_per_message: 0.5 };
        let mut handling = Handling::new(vec![one]).unwrap();
        let work = Work { handled_messages: 2.0, ..Work::default() };
        handling.begin(1, [0].into_iter(), 1.0);
        assert_eq!(handling.end(1, [0].into_iter(), &work, 2.0), None);
        handling.compute(0, 2.0);
        handling.begin(2, [0].into_iter(), 3.0);
        assert_eq!(handling.end(2, [0].into_iter(), &work, 5.0), Some(6.0));
        // It takes nothing of what is computed.
        handling.computed(0, 7.0);
        assert_eq!(handling.compute(0, 7.0), 0.0);
    }
}
