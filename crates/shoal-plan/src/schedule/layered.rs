//! Layer by layer: every layer's forward, and every layer's backward, is a section of the step that all devices go
//! through in the same order. What a section needs (parameters, other devices' activations) may be under way during
//! the one before.

use super::{Lists, Moving};
use crate::program::{Moved, Op, Pass, Purpose};

/// Sections after which a reduction that frees memory must be over: the next one's work hides it.
const REDUCTION_SECTIONS: usize = 1;

pub(super) fn order(lists: &mut Lists) {
    let devices = lists.layout.plan.devices.len();
    let mut layered = Layered {
        starts: vec![(0, 0); devices],
        pending: vec![Vec::new(); devices],
        awaited: vec![Vec::new(); devices],
        lists,
    };
    layered.lists.load();
    let layers = layered.lists.layers();
    for layer in 0..layers {
        layered.forward(layer);
    }
    if layered.lists.purpose == Purpose::Train {
        for layer in (0..layers).rev() {
            layered.backward(layer);
        }
    }
    layered.lists.end();
}

struct Layered<'a, 'b> {
    lists: &'a mut Lists<'b>,
    /// Where each device's last two sections start.
    starts: Vec<(usize, usize)>,
    /// What each device has under way: its place, and the first section that is not to begin before it is over.
    pending: Vec<Vec<(usize, usize)>>,
    /// Places that a device's next computation waits for.
    awaited: Vec<Vec<usize>>,
}

impl Layered<'_, '_> {
    /// The devices that have something to do in a section, each told that it begins.
    fn open(&mut self, layer: usize, section: usize, gathers: Pass) {
        let layout = self.lists.layout;
        let mut devices: Vec<usize> = layout.computing(layer).collect();
        devices.extend(layout.gather(layer, gathers).iter().flat_map(|group| &group.devices));
        devices.sort_unstable();
        devices.dedup();
        for device in devices {
            self.starts[device] = (self.starts[device].1, self.lists.lists[device].len());
            let (over, pending) = self.pending[device].iter().partition(|(_, until)| *until <= section);
            self.pending[device] = pending;
            self.awaited[device].extend(Vec::<(usize, usize)>::into_iter(over).map(|(place, _)| place));
        }
        for device in layout.gather(layer, gathers).iter().flat_map(|group| &group.devices) {
            self.push_early(*device, Op::Gather { layer, pass: gathers });
        }
    }

    /// An instruction that may start with the section before.
    fn push_early(&mut self, device: usize, op: Op) {
        let place = self.lists.push(device, op);
        self.lists.lists[device][place].from = self.starts[device].0;
    }

    /// The device's computations begin at a place: they wait for what is due.
    fn compute_from(&mut self, device: usize, place: usize) {
        if let Some(first) = self.lists.lists[device].get_mut(place) {
            first.after.append(&mut self.awaited[device]);
        }
    }

    fn forward(&mut self, layer: usize) {
        let layout = self.lists.layout;
        self.open(layer, layer, Pass::Forward);
        for share in layout.shares(layer) {
            for from in &layout.chain.layers[layer].inputs {
                for (samples, producer) in layout.pieces(*from, share.samples) {
                    if producer != share.device {
                        let (moved, layer, reader) = (Moved::Activation, *from, layer);
                        let op = Op::Receive { moved, layer, reader, samples, from: producer };
                        self.push_early(share.device, op);
                    }
                }
            }
        }
        let places: Vec<usize> = self.lists.lists.iter().map(Vec::len).collect();
        for share in layout.shares(layer) {
            self.lists.begin(layer, *share);
        }
        self.exchange(layer, false);
        for share in layout.shares(layer) {
            for (place, Moving { reader, .. }) in self.lists.forward(layer, *share) {
                self.pending[share.device].push((place, reader + 1));
            }
        }
        self.close(layer, Pass::Forward, &places);
    }

    fn backward(&mut self, layer: usize) {
        let layout = self.lists.layout;
        let section = self.section_of_backward(layer);
        self.open(layer, section, Pass::Backward);
        for share in layout.shares(layer) {
            for reader in layout.readers(layer) {
                for (samples, from) in layout.pieces(*reader, share.samples) {
                    if from != share.device {
                        let (moved, reader) = (Moved::Gradient, *reader);
                        self.push_early(share.device, Op::Receive { moved, layer, reader, samples, from });
                    }
                }
            }
        }
        let places: Vec<usize> = self.lists.lists.iter().map(Vec::len).collect();
        let normed = layout.chain.batch_norm(layer).is_some();
        if normed {
            for share in layout.shares(layer) {
                self.lists.remake(layer, *share);
                self.lists.begin_backward(layer, *share);
            }
            self.exchange(layer, true);
        }
        for share in layout.shares(layer) {
            if !normed {
                self.lists.remake(layer, *share);
            }
            for (place, Moving { layer: to, .. }) in self.lists.backward(layer, *share) {
                let until = self.section_of_backward(to) + 1;
                self.pending[share.device].push((place, until));
            }
        }
        self.close(layer, Pass::Backward, &places);
        for device in layout.reduce(layer).iter().flat_map(|group| &group.devices) {
            let place = self.lists.push(*device, Op::Reduce { layer });
            // A sum that stays where it was begun frees nothing when it is complete: only its update waits for it.
            if layout.owned(layer).iter().any(|tensor| !layout.sums_whole(*tensor, *device)) {
                self.pending[*device].push((place, section + 1 + REDUCTION_SECTIONS));
            }
        }
    }

    /// The computations of a section began at these places and are all listed.
    fn close(&mut self, layer: usize, pass: Pass, places: &[usize]) {
        let layout = self.lists.layout;
        for device in layout.computing(layer) {
            self.compute_from(device, places[device]);
        }
        for device in layout.gather(layer, pass).iter().flat_map(|group| &group.receivers) {
            self.lists.push(*device, Op::Release { layer, pass });
        }
    }

    fn exchange(&mut self, layer: usize, backward: bool) {
        let layout = self.lists.layout;
        let Some(norm) = layout.chain.batch_norm(layer) else { return };
        if self.lists.purpose != Purpose::Train {
            return;
        }
        for group in 0..norm.group_count(layout.plan.global_batch) {
            for device in layout.exchange(layer, group).iter().flat_map(|group| &group.devices) {
                self.lists.push(*device, Op::Exchange { layer, group, backward });
            }
        }
    }

    fn section_of_backward(&self, layer: usize) -> usize {
        2 * self.lists.layers() - 1 - layer
    }
}
