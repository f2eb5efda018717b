//! Seconds of every layer on every device: what planners and the simulator ask, millions of times. Curves are measured
//! where the profile knows the device's kind, and estimated by the catalogue where it does not; a share of a device that was
//! not measured itself takes as much longer as its part of the whole's rate is smaller.

use shoal_model::{Chain, Precision};

use crate::catalogue;
use crate::chips::{self, Apart, Part, Seat};
use crate::curve::{Fit, TimeCurve};
use crate::error::{Error, Result};
use crate::estimate;
use crate::fleet::Fleet;
use crate::profile::{DeviceProfile, LayerProfile, PROCESSOR, Profile};

/// Bytes that Adam moves for a parameter in host memory: parameter, gradient and both moments come in, parameter and
/// moments go out, four bytes each.
pub const HOST_UPDATE_BYTES: u64 = 28;

/// What every layer takes on every device of a fleet.
#[derive(Clone, Debug)]
pub struct Costs {
    /// By layer.
    layers: Vec<LayerTable>,
    /// By device: which of the kinds it is.
    kind_of: Vec<usize>,
    kinds: Vec<KindCosts>,
    /// By device, where it is a part of a chip.
    seats: Vec<Option<Seat>>,
    /// By node.
    host_bytes_per_second: Vec<f64>,
}

/// A layer as far as costs go.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerTable {
    pub name: String,
    pub parameters: u64,
    /// Bytes that one sample hands on.
    pub output_bytes: u64,
}

/// What was published of a kind of device: a curve a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct KindTable {
    pub kind: String,
    pub forward: Vec<TimeCurve>,
    pub backward: Vec<TimeCurve>,
    pub update_seconds_per_parameter: f64,
}

/// What messages take of those who compute and handle them by the same cores.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Handling {
    /// Of computing, for a byte that is sent or received.
    pub seconds_per_byte: f64,
    /// For which a message waits, beside its bytes, while the device computes.
    pub seconds_per_message: f64,
}

#[derive(Clone, Debug)]
struct KindCosts {
    kind: String,
    estimated: bool,
    /// The kind that this is a share of, and its part of that one's rate, where the share was not measured itself.
    scaled: Option<(String, f64)>,
    update_seconds_per_parameter: f64,
    handling: Handling,
    is_processor: bool,
    /// While those that share its chip rest, of what it takes beside them.
    alone: f64,
    /// By layer: which of the curves are its forward's and its backward's. Equal layers share them.
    of_layer: Vec<(u32, u32)>,
    curves: Vec<Seconds>,
}

/// A curve, worked out for every number of samples that planners usually ask for.
#[derive(Clone, Debug)]
struct Seconds {
    by_samples: Vec<f64>,
    curve: TimeCurve,
    fit: Fit,
}

/// Numbers of samples that are worked out beforehand, unless the table ends earlier.
const WORKED_OUT_SAMPLES: usize = 1024;

impl Seconds {
    fn new(curve: &TimeCurve) -> Seconds {
        let fit = curve.fit();
        let last = curve.samples.last().copied().unwrap_or(0).min(WORKED_OUT_SAMPLES);
        let by_samples = (0..=last).map(|samples| curve.at_with(&fit, samples)).collect();
        Seconds { by_samples, curve: curve.clone(), fit }
    }

    fn at(&self, samples: usize) -> f64 {
        match self.by_samples.get(samples) {
            Some(seconds) => *seconds,
            None => self.curve.at_with(&self.fit, samples),
        }
    }
}

impl Costs {
    /// A chain on a fleet, by a profile if there is one.
    pub fn new(
        chain: &Chain,
        fleet: &Fleet,
        profile: Option<&Profile>,
        precision: Precision,
        sequence: usize,
    ) -> Result<Costs> {
        let single = |layer: usize| LayerProfile::described(chain, &[layer], precision, sequence);
        let described: Vec<LayerProfile> = (0..chain.layers.len()).map(single).collect();
        let of_whole = |kind: &str| {
            if let Some(device) = profile.and_then(|profile| profile.device(kind, precision)) {
                let found = profile.map_or(sequence, |profile| profile.sequence);
                if found != sequence {
                    return Err(Error::OtherSequence { found, wanted: sequence });
                }
                return KindCosts::profiled(device, kind, &described);
            }
            let Some(known) = catalogue::find(kind) else {
                return Err(Error::UnknownKind { kind: kind.to_owned(), nearest: catalogue::nearest(kind) });
            };
            let device = estimate::device(chain, known, precision, sequence);
            KindCosts::profiled(&device, kind, &described)
        };
        let of_kind = |kind: &str| {
            let measured = profile.is_some_and(|profile| profile.device(kind, precision).is_some());
            match catalogue::share_of(kind).filter(|_| !measured) {
                Some((percent, whole)) => Ok(of_whole(whole)?.share(kind, percent)),
                None => of_whole(kind),
            }
        };
        let kinds = fleet.kinds().into_iter().map(of_kind).collect::<Result<_>>()?;
        let table = |mut of: LayerProfile| LayerTable {
            name: of.layers.swap_remove(0),
            parameters: of.parameters,
            output_bytes: of.output_bytes,
        };
        let layers = described.into_iter().map(table).collect();
        Ok(Costs::of(layers, kinds, fleet))
    }

    /// From curves alone, for published profiles of models that are none of our chains. Every kind of the fleet is in
    /// `tables`.
    pub fn from_tables(layers: Vec<LayerTable>, tables: &[KindTable], fleet: &Fleet) -> Result<Costs> {
        let of_kind = |kind: &str| {
            let table = tables.iter().find(|table| catalogue::same(&table.kind, kind));
            let table = table.ok_or_else(|| Error::UnknownKind { kind: kind.to_owned(), nearest: None })?;
            for found in [table.forward.len(), table.backward.len()] {
                if found != layers.len() {
                    let wanted = layers.len();
                    return Err(Error::TableLength { kind: kind.to_owned(), found, wanted });
                }
            }
            let curves = table.forward.iter().chain(&table.backward);
            if let Some(what) = curves.filter_map(TimeCurve::defect).next() {
                return Err(Error::TableCurve { kind: kind.to_owned(), what });
            }
            let mut costs = KindCosts {
                kind: kind.to_owned(),
                estimated: false,
                scaled: None,
                update_seconds_per_parameter: table.update_seconds_per_parameter,
                handling: Handling::default(),
                is_processor: false,
                alone: 1.0,
                of_layer: Vec::new(),
                curves: Vec::new(),
            };
            for (forward, backward) in table.forward.iter().zip(&table.backward) {
                let pair = (costs.place(forward), costs.place(backward));
                costs.of_layer.push(pair);
            }
            Ok(costs)
        };
        let kinds = fleet.kinds().into_iter().map(of_kind).collect::<Result<_>>()?;
        Ok(Costs::of(layers, kinds, fleet))
    }

    fn of(layers: Vec<LayerTable>, kinds: Vec<KindCosts>, fleet: &Fleet) -> Costs {
        let place = |kind: &str| kinds.iter().position(|known| known.kind == kind);
        let kind_of = fleet.devices.iter().filter_map(|device| place(&device.kind)).collect();
        let host_bytes_per_second = fleet.nodes.iter().map(|node| node.host_bytes_per_second).collect();
        let mut costs = Costs { layers, kind_of, kinds, seats: Vec::new(), host_bytes_per_second };
        costs.seats = chips::seats(fleet, Apart::Machines, |device| costs.kind(device).part());
        costs
    }

    /// All of the fleet on one machine. What some kinds of its devices do is played there: it lasts as long as it should,
    /// whatever passes and is computed beside it.
    pub fn in_a_box(mut self, fleet: &Fleet, is_played: impl Fn(&str) -> bool) -> Costs {
        for kind in self.kinds.iter_mut().filter(|kind| is_played(&kind.kind)) {
            kind.handling = Handling::default();
        }
        let part_of =
            |device: usize| self.kind(device).part().filter(|_| !is_played(&self.kind(device).kind));
        self.seats = chips::seats(fleet, Apart::InABox, part_of);
        self
    }

    /// Hosts take so many times what they did.
    pub(crate) fn stretch_hosts(&mut self, times: f64) {
        self.host_bytes_per_second.iter_mut().for_each(|rate| *rate /= times);
    }

    /// One device takes so many times what it did: it is of another kind then.
    pub(crate) fn stretch(&mut self, device: usize, kind: &str, times: f64) {
        let known = self.kinds.iter().position(|known| known.kind == kind);
        self.kind_of[device] = known.unwrap_or_else(|| {
            let mut stretched = self.kind(device).clone();
            kind.clone_into(&mut stretched.kind);
            stretched.stretch(times);
            self.kinds.push(stretched);
            self.kinds.len() - 1
        });
    }

    fn kind(&self, device: usize) -> &KindCosts {
        &self.kinds[self.kind_of[device]]
    }

    /// Seconds of a layer's forward.
    pub fn forward(&self, layer: usize, device: usize, samples: usize) -> f64 {
        let kind = self.kind(device);
        kind.curves[kind.of_layer[layer].0 as usize].at(samples)
    }

    /// Seconds of a layer's backward, without recomputation.
    pub fn backward(&self, layer: usize, device: usize, samples: usize) -> f64 {
        let kind = self.kind(device);
        kind.curves[kind.of_layer[layer].1 as usize].at(samples)
    }

    /// Seconds of the optimizer on the device.
    pub fn update(&self, device: usize, parameters: u64) -> f64 {
        self.kind(device).update_seconds_per_parameter * parameters as f64
    }

    /// What messages take of a device's computing: nothing, unless it is a processor.
    pub fn handling(&self, device: usize) -> Handling {
        self.kind(device).handling
    }

    /// Whether a device is a processor: its memory is its host's, and what the host does its own cores do.
    pub fn is_processor(&self, device: usize) -> bool {
        self.kind(device).is_processor
    }

    /// Where a device sits on a chip that it is a part of.
    pub fn seat(&self, device: usize) -> Option<Seat> {
        self.seats[device]
    }

    /// Seconds of the optimizer in the node's host memory, whose bandwidth bounds it.
    pub fn host_update(&self, node: usize, parameters: u64) -> f64 {
        (HOST_UPDATE_BYTES * parameters) as f64 / self.host_bytes_per_second[node]
    }

    /// Bytes of one sample's boundary activation after the layer.
    pub fn output_bytes(&self, layer: usize) -> u64 {
        self.layers[layer].output_bytes
    }

    /// Numbers that are trained in the layer; a tied tensor counts in each layer that uses it.
    pub fn parameters(&self, layer: usize) -> u64 {
        self.layers[layer].parameters
    }

    /// Layers there are.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Whether the curves of a kind come from public figures and not from a measurement.
    pub fn estimated(&self, kind: &str) -> bool {
        self.kinds.iter().any(|known| known.estimated && catalogue::same(&known.kind, kind))
    }

    /// Of a share that was not measured itself: the kind it is a share of, and its part of that one's rate.
    pub fn scaled(&self, kind: &str) -> Option<(&str, f64)> {
        let known = self.kinds.iter().find(|known| known.kind == kind)?;
        known.scaled.as_ref().map(|(whole, rate)| (whole.as_str(), *rate))
    }
}

impl KindCosts {
    /// What a device of the kind is a part of, where it is one.
    fn part(&self) -> Option<Part<'_>> {
        let alone = self.alone;
        if let Some((percent, whole)) = catalogue::share_of(&self.kind) {
            return Some(Part { whole, percent: Some(percent), alone });
        }
        self.is_processor.then_some(Part { whole: catalogue::CPU, percent: None, alone })
    }

    /// The layers are the chain's.
    fn profiled(device: &DeviceProfile, kind: &str, layers: &[LayerProfile]) -> Result<KindCosts> {
        let update = device.update_seconds_per_parameter;
        let update =
            update.or_else(|| Some(estimate::update_seconds(catalogue::find(kind)?, device.precision)));
        let update = update.ok_or_else(|| Error::UnknownUpdate { kind: kind.to_owned() })?;
        let mut costs = KindCosts {
            kind: kind.to_owned(),
            estimated: device.estimated,
            scaled: None,
            update_seconds_per_parameter: update,
            handling: Handling {
                seconds_per_byte: device.handling_seconds_per_byte.unwrap_or(0.0),
                seconds_per_message: device.handling_seconds_per_message.unwrap_or(0.0),
            },
            is_processor: device.device == PROCESSOR || catalogue::same(kind, catalogue::CPU),
            alone: device.alone.unwrap_or(1.0),
            of_layer: Vec::new(),
            curves: Vec::new(),
        };
        for layer in layers {
            let name = &layer.layers[0];
            let Some(profile) = device.layer(name) else {
                return Err(Error::MissingLayer { kind: kind.to_owned(), layer: name.clone() });
            };
            // Not its parameters: a table of positions is as long as the sequences it was measured with.
            let (found, wanted) = (profile.forward_flops, layer.forward_flops);
            if found != wanted {
                return Err(Error::OtherModel { layer: name.clone(), found, wanted });
            }
            let pair = (costs.place(&profile.forward), costs.place(&profile.backward));
            costs.of_layer.push(pair);
        }
        Ok(costs)
    }

    /// What a share of the device takes.
    fn share(mut self, kind: &str, percent: u32) -> KindCosts {
        let rate = catalogue::share_rate(percent);
        self.stretch(1.0 / rate);
        self.scaled = Some((std::mem::replace(&mut self.kind, kind.to_owned()), rate));
        self
    }

    fn stretch(&mut self, times: f64) {
        self.curves = self.curves.iter().map(|known| Seconds::new(&known.curve.slowed(times))).collect();
        self.update_seconds_per_parameter *= times;
        self.handling.seconds_per_byte *= times;
        self.handling.seconds_per_message *= times;
    }

    /// Where the curve stands among those worked out.
    fn place(&mut self, curve: &TimeCurve) -> u32 {
        let known = self.curves.iter().rposition(|known| known.curve == *curve);
        known.unwrap_or_else(|| {
            self.curves.push(Seconds::new(curve));
            self.curves.len() - 1
        }) as u32
    }
}
