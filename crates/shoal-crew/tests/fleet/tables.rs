//! Hand-made tables of different shapes for any number of workers, each slice on two of them.

use shoal_plan::one_device::table;
use shoal_plan::{
    Activations, Compute, ComputeCopy, DeviceRow, Held, Holder, Instruction, Op, Order, Plan, Program,
    Purpose, Residence, Samples, Slice, compile, forecast,
};

use crate::job::{GLOBAL_BATCH, chain, offer, shape};

const MICRO_BATCH: usize = 2;

/// A table whose shape the number chooses.
pub fn shaped(number: u64, workers: usize) -> Plan {
    match (workers, number % 3) {
        (1, _) => base(1),
        (_, 0) => pipelined(workers),
        (_, 1) => sharded(workers),
        _ => replicated(workers),
    }
}

/// The most that any of a plan's devices takes of its own memory.
pub fn device_bytes(plan: &Plan) -> u64 {
    let chain = chain();
    let programs = compile(plan, &chain, Purpose::Train).expect("it compiles");
    programs.iter().map(|program| forecast(program, plan, &chain).total()).max().expect("a device")
}

/// What each device's forwards and backwards are made to last.
pub fn work_ms(plan: &Plan, paced_us: u64) -> Vec<f64> {
    let programs = compile(plan, &chain(), Purpose::Train).expect("it compiles");
    let is_paced = |next: &&Instruction| matches!(next.op, Op::Forward { .. } | Op::Backward { .. });
    let count = |program: &Program| program.instructions.iter().filter(is_paced).count();
    // One that only keeps state has a little to do all the same.
    programs.iter().map(|program| count(program).max(1) as f64 * paced_us as f64 / 1e3).collect()
}

fn base(workers: usize) -> Plan {
    let mut plan = table(&chain(), shape(), &offer("w0"), MICRO_BATCH, Activations::Keep, false);
    let row = plan.devices[0].clone();
    plan.devices =
        (0..workers).map(|device| DeviceRow { name: format!("w{device}"), ..row.clone() }).collect();
    plan
}

fn micro_batches(samples: std::ops::Range<usize>) -> Vec<Samples> {
    let end = samples.end;
    samples.step_by(MICRO_BATCH).map(|start| Samples { start, end: (start + MICRO_BATCH).min(end) }).collect()
}

/// A slice on a device, and against its loss in the memory of the next one's host.
fn mirrored(device: usize, workers: usize, slice: Slice) -> [Held; 2] {
    [Holder::Device(device), Holder::Host((device + 1) % workers)].map(|holder| Held { holder, slice })
}

/// Each worker has some of the layers, and their state.
fn pipelined(workers: usize) -> Plan {
    let chain = chain();
    let mut plan = base(workers);
    let layers = chain.layers.len();
    let device_of = |layer: usize| layer * workers / layers;
    plan.order = Order::OneForwardOneBackward;
    for (layer, row) in plan.layers.iter_mut().enumerate() {
        let (device, micro_batches) = (device_of(layer), micro_batches(0..GLOBAL_BATCH));
        row.compute = vec![Compute { device, micro_batches, activations: Activations::Keep }];
    }
    for (tensor, row) in plan.tensors.iter_mut().enumerate() {
        let mut devices: Vec<usize> = chain.users(tensor).map(device_of).collect();
        devices.dedup();
        let resident = |device: &usize| ComputeCopy { device: *device, residence: Residence::Resident };
        row.compute_copies = devices.iter().map(resident).collect();
        row.optimizer = mirrored(devices[0], workers, Slice { start: 0, end: row.elements }).into();
        row.gradient = row.optimizer.clone();
    }
    plan
}

/// Every worker has some of the samples, later ones more.
fn divide_samples(plan: &mut Plan, workers: usize) {
    let bound = |device: usize| GLOBAL_BATCH * device * (device + 1) / (workers * (workers + 1));
    for row in &mut plan.layers {
        row.compute = (0..workers)
            .map(|device| Compute {
                device,
                micro_batches: micro_batches(bound(device)..bound(device + 1)),
                activations: Activations::Keep,
            })
            .filter(|compute| !compute.micro_batches.is_empty())
            .collect();
    }
}

/// Every worker has some of every tensor, earlier ones more; parameters are fetched for each use.
fn sharded(workers: usize) -> Plan {
    let mut plan = base(workers);
    plan.order = Order::LayerFirst;
    divide_samples(&mut plan, workers);
    for row in &mut plan.tensors {
        let bound = |device: usize| row.elements * device * (2 * workers - device) / (workers * workers);
        let fetched = |device: usize| ComputeCopy { device, residence: Residence::Fetched };
        row.compute_copies = (0..workers).map(fetched).collect();
        row.optimizer = (0..workers)
            .map(|device| (device, Slice { start: bound(device), end: bound(device + 1) }))
            .filter(|(_, slice)| slice.count() > 0)
            .flat_map(|(device, slice)| mirrored(device, workers, slice))
            .collect();
        row.gradient = row.optimizer.clone();
    }
    plan
}

/// Every worker computes with copies of its own; the first keeps and updates the state, and so does the last one's host.
fn replicated(workers: usize) -> Plan {
    let mut plan = base(workers);
    divide_samples(&mut plan, workers);
    for row in &mut plan.tensors {
        let resident = |device: usize| ComputeCopy { device, residence: Residence::Resident };
        row.compute_copies = (0..workers).map(resident).collect();
        let slice = Slice { start: 0, end: row.elements };
        let holders = [Holder::Device(0), Holder::Host(workers - 1)];
        row.optimizer = holders.map(|holder| Held { holder, slice }).into();
        row.gradient = row.optimizer.clone();
    }
    plan
}
