//! What faults do to the world, and how it heals.

use shoal_control::controller::state::{Job, Wish};
use shoal_control::message::JobId;
use shoal_control::{Keeper, Worker, controller, worker};

use super::{Happening, Party, World};
use crate::disk::TornDisk;
use crate::faults::{FAULTS_END_MS, Fault, Weather};

impl World<'_> {
    pub(super) fn fault(&mut self, fault: Fault) {
        self.say(|| format!("fault: {fault:?}"));
        let until_ms = |for_ms| self.now_ms + for_ms;
        match fault {
            Fault::Start { node } => {
                if self.now_ms > 200 {
                    self.coverage.count("fault: worker joins");
                }
                self.start_worker(node);
            }
            Fault::Kill { node, for_ms, reset } => {
                self.coverage.count("fault: worker killed");
                if reset {
                    self.reset(node);
                }
                self.kill(node, for_ms);
            }
            Fault::Freeze { node, for_ms } => {
                self.coverage.count("fault: worker frozen");
                self.nodes[node].frozen_until_ms = until_ms(for_ms);
            }
            Fault::Slow { node, percent } => {
                self.coverage.count("fault: worker slowed");
                self.nodes[node].pace_percent = percent;
            }
            Fault::Notice { node, in_ms, back_ms } => {
                self.coverage.count("fault: preemption notice");
                let life = self.nodes[node].life;
                self.place(until_ms(in_ms), Happening::Taken { node, life, back_ms });
                self.worker(node, worker::Event::Notice { in_ms });
            }
            Fault::KillController { for_ms } => {
                self.coverage.count("fault: controller killed");
                self.kill_controller(for_ms);
            }
            Fault::Fuse { operations, for_ms } => {
                self.controller_down_ms = for_ms;
                if let Some(keeper) = &mut self.keeper {
                    keeper.disk_mut().fuse = Some(operations);
                }
            }
            Fault::FreezeController { for_ms } => {
                self.coverage.count("fault: controller frozen");
                self.controller_frozen_until_ms = until_ms(for_ms);
            }
            Fault::Cut { from, to, both, for_ms } => {
                self.coverage.count(match (from, to, both) {
                    (_, _, false) => "fault: one way cut",
                    (Some(_), Some(_), true) => "fault: two workers cut off from each other",
                    _ => "fault: worker cut off",
                });
                let until_ms = until_ms(for_ms);
                self.cuts.insert((from, to), until_ms);
                if both {
                    self.cuts.insert((to, from), until_ms);
                }
            }
            Fault::Isolate { node, for_ms } => {
                self.coverage.count(match node {
                    Some(_) => "fault: worker cut off",
                    None => "fault: controller cut off",
                });
                self.isolate(node, until_ms(for_ms));
            }
            Fault::Reset { node, for_ms } => {
                self.coverage.count("fault: connections reset");
                let until_ms = until_ms(for_ms);
                self.reset(node);
                self.isolate(Some(node), until_ms);
            }
            Fault::Cramp { node, for_ms } => {
                self.coverage.count("fault: worker without room");
                self.nodes[node].cramped_until_ms = until_ms(for_ms);
            }
            Fault::Break { node, for_ms } => {
                self.coverage.count("fault: worker where nothing works");
                self.nodes[node].broken_until_ms = until_ms(for_ms);
            }
            Fault::Damage { job, all, for_ms } => self.damage(job, all, for_ms),
            Fault::Submit { job, spec } => self.ask_controller(controller::Event::Submit { job, spec }),
            Fault::Wish { job, wish } => self.ask_controller(controller::Event::Wish { job, wish }),
        }
    }

    fn isolate(&mut self, party: Party, until_ms: u64) {
        for other in std::iter::once(None).chain((0..self.nodes.len()).map(Some)) {
            self.cuts.insert((party, other), until_ms);
            self.cuts.insert((other, party), until_ms);
        }
    }

    /// Everyone sees a worker's connections end.
    fn reset(&mut self, node: usize) {
        let Some(worker) = self.nodes[node].worker.as_ref().and_then(Worker::id) else { return };
        let at_ms = self.now_ms + self.random.between(1, 12);
        self.place(at_ms, Happening::Closed { worker });
        for other in (0..self.nodes.len()).filter(|other| *other != node) {
            let at_ms = self.now_ms + self.random.between(1, 12);
            self.place(at_ms, Happening::PeerClosed { node: other, worker });
        }
    }

    fn damage(&mut self, job: JobId, all: bool, for_ms: Option<u64>) {
        let jobs = self.keeper.as_ref().map(|keeper| &keeper.state().jobs);
        let Some(state) = jobs.and_then(|jobs| jobs.get(&job)) else { return };
        let count = if all { usize::MAX } else { 1 };
        let ids: Vec<u64> =
            state.checkpoints.iter().rev().take(count).map(|checkpoint| checkpoint.id).collect();
        if ids.is_empty() {
            return;
        }
        self.coverage.count(match for_ms {
            Some(_) => "fault: checkpoints away",
            None => "fault: checkpoints damaged",
        });
        ids.into_iter().for_each(|id| self.store.damage(job, id, for_ms.is_none()));
        if let Some(for_ms) = for_ms {
            self.place(self.now_ms + for_ms, Happening::Mend);
        }
    }

    /// A user asks again until the controller is there.
    fn ask_controller(&mut self, event: controller::Event) {
        if self.keeper.is_some() && self.controller_frozen_until_ms <= self.now_ms {
            self.controller(event.clone());
        }
        let known = |keeper: &Keeper<TornDisk>| match &event {
            controller::Event::Submit { job, .. } => keeper.state().jobs.contains_key(job),
            controller::Event::Wish { job, wish } => {
                let job = keeper.state().jobs.get(job);
                let heard = |job: &Job| job.wish == *wish && !job.has_failed() || job.wish == Wish::Cancel;
                // Long after the last fault there is no such job.
                let never = self.now_ms > FAULTS_END_MS;
                job.map_or(never, |job| !job.is_open() || heard(job))
            }
            _ => true,
        };
        if !self.keeper.as_ref().is_some_and(known) {
            let fault = match event {
                controller::Event::Submit { job, spec } => Fault::Submit { job, spec },
                // Whoever wanted a pause gives up; otherwise it might come after the wish to go on.
                controller::Event::Wish { wish: Wish::Pause, .. } => return,
                controller::Event::Wish { job, wish } => Fault::Wish { job, wish },
                _ => return,
            };
            self.place(self.now_ms + 200, Happening::Fault(fault));
        }
    }

    /// No fault is left: everyone is there, nothing is cut, and nothing is paused.
    pub(super) fn heal(&mut self) {
        self.say(|| "all faults end".to_owned());
        self.cuts.clear();
        self.weather = Weather { lost: 0, doubled: 0, late: 0 };
        self.controller_frozen_until_ms = 0;
        self.store.mend();
        if let Some(keeper) = &mut self.keeper {
            keeper.disk_mut().fuse = None;
        }
        self.place(self.now_ms + 1, Happening::Start { party: None });
        for node in 0..self.nodes.len() {
            self.nodes[node].frozen_until_ms = 0;
            self.nodes[node].pace_percent = 100;
            (self.nodes[node].cramped_until_ms, self.nodes[node].broken_until_ms) = (0, 0);
            self.place(self.now_ms + 1, Happening::Start { party: Some(node) });
        }
        for job in [JobId(1), JobId(2)] {
            let fault = Fault::Wish { job, wish: Wish::Run };
            self.place(self.now_ms + 3_100, Happening::Fault(fault));
        }
    }
}
