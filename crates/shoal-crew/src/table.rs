//! A plan between planner, controller and crew. Planners know tables and fleets, controllers know workers and who holds the
//! same slices; here one becomes the other.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use shoal_control::message::{self, WorkerId};
use shoal_plan::{Holder, Plan};

use crate::error::CrewError;

/// What stands in [`message::Plan::table`], as JSON: the table, whose devices are the plan's members in their order, and
/// what is predicted of each device's part in a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    pub plan: Plan,
    /// What own work takes, waiting and messages not counted: milliseconds by device; none where nothing was predicted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub work_ms: Vec<f64>,
    /// How much of a step a device has nothing to compute until others are done: shares by device; none where nothing was
    /// predicted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bubbles: Vec<f64>,
}

impl Table {
    /// A plan for the controller, on these workers in the order of the table's devices. Devices that have no part in it are
    /// left out: a worker without one could not tell how far its job has come.
    ///
    /// # Panics
    /// If a device with a part in it has no worker.
    pub fn message(self, workers: &[WorkerId], step_ms: u64) -> message::Plan {
        let used: Vec<usize> = parts(&self.plan).into_iter().collect();
        let members = used.iter().map(|device| workers[*device]).collect();
        let of = |all: &[f64]| used.iter().filter_map(|device| all.get(*device).copied()).collect();
        let (work_ms, bubbles) = (of(&self.work_ms), of(&self.bubbles));
        let table = Table { plan: only(self.plan, &used), work_ms, bubbles };
        let holders = table.plan.holders();
        message::Plan { members, holders, step_ms, table: table.text() }
    }

    pub fn text(&self) -> String {
        serde_json::to_string(self).expect("plain data is JSON")
    }

    /// The table of a plan that came from the controller.
    pub fn of(plan: &message::Plan) -> Result<Table, CrewError> {
        let table: Table = serde_json::from_str(&plan.table)
            .map_err(|error| CrewError::Table { what: error.to_string() })?;
        let (devices, members) = (table.plan.devices.len(), plan.members.len());
        let fits = |predicted: &[f64]| predicted.is_empty() || predicted.len() == members;
        if devices != members || !fits(&table.work_ms) || !fits(&table.bubbles) {
            return Err(CrewError::Table { what: format!("{devices} devices for {members} workers") });
        }
        let copies = table.plan.tensors.iter().flat_map(|row| &row.compute_copies).map(|copy| copy.device);
        if let Some(device) = parts(&table.plan).into_iter().chain(copies).find(|device| *device >= devices) {
            return Err(CrewError::Table { what: format!("there is no device {device} among {devices}") });
        }
        Ok(table)
    }

    /// The plan with its devices named after their workers: by these names two plans' devices are told apart.
    pub(crate) fn named(&self, members: &[WorkerId]) -> Plan {
        let mut plan = self.plan.clone();
        for (device, worker) in plan.devices.iter_mut().zip(members) {
            device.name = name_of(*worker);
        }
        plan
    }
}

/// A worker's device in the tables that are compared.
pub(crate) fn name_of(worker: WorkerId) -> String {
    format!("worker {}", worker.0)
}

/// Devices that compute something or keep something.
fn parts(plan: &Plan) -> BTreeSet<usize> {
    let computing = plan.layers.iter().flat_map(|row| &row.compute).map(|compute| compute.device);
    let held = plan.tensors.iter().flat_map(|row| row.gradient.iter().chain(&row.optimizer));
    computing.chain(held.map(|held| held.holder.device())).collect()
}

/// The same table on some of its devices, which are all that have a part in it.
fn only(mut plan: Plan, used: &[usize]) -> Plan {
    let place = |device: usize| used.binary_search(&device).expect("every device with a part is used");
    plan.devices = used.iter().map(|device| plan.devices[*device].clone()).collect();
    for compute in plan.layers.iter_mut().flat_map(|row| &mut row.compute) {
        compute.device = place(compute.device);
    }
    for row in &mut plan.tensors {
        row.compute_copies.retain(|copy| used.binary_search(&copy.device).is_ok());
        row.compute_copies.iter_mut().for_each(|copy| copy.device = place(copy.device));
        for held in row.gradient.iter_mut().chain(&mut row.optimizer) {
            held.holder = match held.holder {
                Holder::Device(device) => Holder::Device(place(device)),
                Holder::Host(device) => Holder::Host(place(device)),
                Holder::Disk(device) => Holder::Disk(place(device)),
            };
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use shoal_plan::draw::{self, Draw};
    use shoal_plan::{Purpose, compile};

    use super::*;

    #[test]
    fn tables_pass_through_the_controller_without_devices_that_have_no_part() {
        let mut idle = 0;
        for seed in 0..100 {
            let mut draw = Draw::new(seed);
            let (chain, sequence) = draw::model(&mut draw);
            let step = draw::step(&mut draw, sequence);
            let plan = draw::table(&chain, step, 5, &mut draw);
            let count = plan.devices.len();
            let workers: Vec<WorkerId> = (0..count as u64).map(|number| WorkerId(7 + number)).collect();
            let work_ms: Vec<f64> = (0..count).map(|device| device as f64).collect();
            let bubbles = work_ms.iter().map(|ms| ms / 10.0).collect();
            let sent = Table { plan: plan.clone(), work_ms, bubbles }.message(&workers, 12);
            let came = Table::of(&sent).unwrap();
            idle += count - sent.members.len();
            assert_eq!((came.work_ms.len(), came.bubbles.len()), (sent.members.len(), sent.members.len()));
            for (member, (work_ms, bubble)) in sent.members.iter().zip(came.work_ms.iter().zip(&came.bubbles))
            {
                assert_eq!((member.0 - 7, *bubble), (*work_ms as u64, work_ms / 10.0));
            }
            let programs = compile(&came.plan, &chain, Purpose::Train).unwrap();
            assert!(programs.iter().all(|program| !program.instructions.is_empty()), "seed {seed}");
            assert!(sent.holders.iter().flatten().all(|place| *place < sent.members.len()));
        }
        assert!(idle > 0, "no table had an idle device");
    }

    #[test]
    fn tables_that_name_devices_which_there_are_not_are_refused() {
        let mut draw = Draw::new(1);
        let (chain, sequence) = draw::model(&mut draw);
        let step = draw::step(&mut draw, sequence);
        let plan = draw::table(&chain, step, 5, &mut draw);
        let workers: Vec<WorkerId> = (0..plan.devices.len() as u64).map(WorkerId).collect();
        let sent = Table { plan, work_ms: Vec::new(), bubbles: Vec::new() }.message(&workers, 12);
        let refused = |change: &dyn Fn(&mut Table)| {
            let mut table = Table::of(&sent).unwrap();
            change(&mut table);
            Table::of(&message::Plan { table: table.text(), ..sent.clone() }).is_err()
        };
        assert!(!refused(&|_| {}));
        assert!(refused(&|table| table.plan.layers[0].compute[0].device = 99));
        assert!(refused(&|table| table.plan.tensors[0].optimizer[0].holder = Holder::Host(99)));
        assert!(refused(&|table| table.plan.tensors[0].compute_copies[0].device = 99));
        assert!(refused(&|table| drop(table.plan.devices.pop())));
        assert!(refused(&|table| table.bubbles.extend([0.5; 99])));
        assert!(Table::of(&message::Plan { table: "{}".into(), ..sent.clone() }).is_err());
    }
}
