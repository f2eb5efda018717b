//! How the pipeline engines that others measured run a step, as far as it differs from ours: micro-batches by one forward
//! and one backward, as in ours, but
//!
//! - **transfers stand in the stream that computes.** Each forward comes after the gradient of the last backward has been
//!   sent to the stage before and the next activation has come from there; each backward after the gradient has come
//!   from the stage behind and the last activation has been sent there. Both ends wait, nothing overlaps;
//! - **GPUs of a tensor-parallel group send a part each.** The group's whole message passes its machine's interfaces at
//!   once, and the receivers gather the parts among them before they compute;
//! - **gradients are added up at the very end**, when all of a stage's are there.
//!
//! Everything else is the program's and the fleet's.

use shoal_fleet::Link;
use shoal_plan::{Op, Pace, Samples};
use shoal_sim::flows::Resource;
use shoal_sim::{FleetWorld, Work, World};

/// What a device exchanges with its neighbours.
#[derive(Clone, Debug)]
pub struct Place {
    pub first_layer: usize,
    pub last_layer: usize,
    /// To the stage before and to the one behind, where there is one.
    pub before: Option<Link>,
    pub behind: Option<Link>,
    /// From the host to a GPU, where what is gathered into is made on the host and copied every time.
    pub host: Option<Link>,
    /// Between the group's GPUs, and how many they are.
    pub within: Option<Link>,
    pub degree: usize,
}

pub struct InStream<'a> {
    fleet: FleetWorld<'a>,
    /// By device.
    places: Vec<Place>,
    /// Bytes that one sample hands from stage to stage.
    boundary_bytes: u64,
    /// Of the slowest stage's gradients.
    reduce_seconds: f64,
}

impl<'a> InStream<'a> {
    pub fn new(
        fleet: FleetWorld<'a>,
        places: Vec<Place>,
        boundary_bytes: u64,
        reduce_seconds: f64,
    ) -> InStream<'a> {
        InStream { fleet, places, boundary_bytes, reduce_seconds }
    }

    /// One message each way to a neighbour, room for the one that came, and its gathering.
    fn exchange(&self, place: &Place, neighbour: &Option<Link>, samples: usize) -> f64 {
        let Some(link) = neighbour else { return 0.0 };
        let bytes = self.boundary_bytes * samples as u64;
        let degree = place.degree as u64;
        let gathered =
            place.within.as_ref().map_or(0.0, |within| within.seconds(bytes * (degree - 1) / degree));
        let made = place.host.as_ref().map_or(0.0, |host| host.seconds(bytes));
        2.0 * link.seconds(bytes) + made + gathered
    }

    fn before_forward(&self, layer: usize, device: usize, samples: usize) -> f64 {
        let place = &self.places[device];
        if layer == place.first_layer { self.exchange(place, &place.before, samples) } else { 0.0 }
    }

    fn before_backward(&self, layer: usize, device: usize, samples: usize) -> f64 {
        let place = &self.places[device];
        if layer == place.last_layer { self.exchange(place, &place.behind, samples) } else { 0.0 }
    }
}

fn later(mut work: Work, seconds: f64) -> Work {
    work.seconds += seconds;
    work
}

impl World for InStream<'_> {
    fn resources(&self) -> &[Resource] {
        self.fleet.resources()
    }

    fn alone(&self, op: &Op, device: usize) -> Work {
        let count = |samples: Samples| samples.count();
        match *op {
            Op::Forward { layer, samples, .. } => {
                later(self.fleet.alone(op, device), self.before_forward(layer, device, count(samples)))
            }
            Op::Backward { layer, samples } => {
                later(self.fleet.alone(op, device), self.before_backward(layer, device, count(samples)))
            }
            _ => self.fleet.alone(op, device),
        }
    }

    fn together(&self, op: &Op, device: usize) -> Work {
        match op {
            // Their time is in the work that they stand before, and in the norm, which waits for all gradients.
            Op::Send { .. } | Op::Receive { .. } | Op::Reduce { .. } => Work::default(),
            Op::GradientNorm => later(self.fleet.together(op, device), self.reduce_seconds),
            _ => self.fleet.together(op, device),
        }
    }
}

impl Pace for InStream<'_> {
    fn forward(&self, layer: usize, device: usize, samples: usize) -> f64 {
        self.fleet.forward(layer, device, samples) + self.before_forward(layer, device, samples)
    }

    fn backward(&self, layer: usize, device: usize, samples: usize) -> f64 {
        self.fleet.backward(layer, device, samples) + self.before_backward(layer, device, samples)
    }

    fn transfer(&self, _layer: usize, _from: usize, _to: usize, _samples: usize) -> f64 {
        0.0
    }
}
