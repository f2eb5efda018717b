//! A real fleet without a network service: a controller with its log in this process, workers as processes of their own with
//! real crews, killed with SIGKILL, joined, taken away; plans of different shapes that give way to each other. Whatever
//! happens, each step counts once and has the loss that one device gives it.
//!
//! The test has its own main, because it starts itself again as the workers. `SHOAL_SEEDS` is how many random courses there
//! are, `SHOAL_SEED` the first; `SHOAL_ONLY` names one scenario.

mod controller;
mod job;
mod tables;
mod worker;

use std::collections::BTreeSet;
use std::time::Instant;

use controller::Fleet;
use job::Description;
use shoal_control::controller::record::Change;
use shoal_control::controller::state::{Phase, Rest, Wish};

/// How far a loss may be from that of one device.
const TOLERANCE: f64 = 1e-5;
const STEPS: u64 = 60;
const LR: f64 = 3e-3;
const SEEDS: u64 = 2;
/// A device's memory, where nothing is said: enough for two plans' shares.
const DEVICE_BYTES: u64 = 32 << 20;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.get(1).is_some_and(|word| word == "worker") {
        return worker::run(&arguments[2], arguments.get(3));
    }
    let only = std::env::var("SHOAL_ONLY").ok();
    let scenarios: [(&str, fn()); 14] = [
        ("uninterrupted", uninterrupted),
        ("joined", joined),
        ("late", late),
        ("killed", killed),
        ("killed_while_moving", killed_while_moving),
        ("frozen", frozen),
        ("slow", slow),
        ("two_at_once", two_at_once),
        ("taken_away", taken_away),
        ("controller_lost", controller_lost),
        ("paused", paused),
        ("little_room", little_room),
        ("not_a_number", not_a_number),
        ("held_out", held_out),
    ];
    for (name, scenario) in scenarios {
        if only.as_deref().is_none_or(|only| only == name) {
            let began = Instant::now();
            scenario();
            println!("test {name}: ok, {:.1} s", began.elapsed().as_secs_f64());
        }
    }
}

fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|number| number.parse().ok()).unwrap_or(usual)
}

/// A fleet of workers on a job, its planner beginning with some shape.
struct Course {
    fleet: Fleet,
    _folder: tempfile::TempDir,
}

impl Course {
    fn new(workers: usize, shape: u64, checkpoint_every: u64, device_bytes: u64) -> Course {
        Course::of(workers, shape, checkpoint_every, |usual| Description { device_bytes, ..usual })
    }

    fn of(
        workers: usize,
        shape: u64,
        checkpoint_every: u64,
        change: impl FnOnce(Description) -> Description,
    ) -> Course {
        let folder = tempfile::tempdir().expect("a folder");
        let description = change(Description {
            folder: folder.path().to_owned(),
            steps: STEPS,
            device_bytes: DEVICE_BYTES,
            paced_us: 1_000,
            lr: LR,
            eval_every: None,
            slow: None,
            late: None,
        });
        Course { fleet: Fleet::new(description, workers, shape, checkpoint_every), _folder: folder }
    }

    /// The job comes to its end, with each step counted once and the losses of one device.
    fn check(mut self) -> Fleet {
        let fleet = &mut self.fleet;
        fleet.until_done();
        let ended = fleet.ended();
        assert!(ended.is_empty(), "{ended:?} ended by themselves: {:#?}", fleet.notices);
        let job = fleet.job();
        assert_eq!(job.committed, STEPS);
        assert_eq!(job.counted - job.undone, STEPS, "steps that count");
        let expected = job::uninterrupted(&fleet.description);
        for (step, expected) in (1..).zip(&expected.losses) {
            let losses = fleet.losses.get(&step).unwrap_or_else(|| panic!("nobody told of step {step}"));
            losses.values().for_each(|loss| assert_near(*loss, *expected, step));
        }
        let measured: Vec<&u64> = fleet.held_out.keys().collect();
        assert_eq!(measured, expected.held_out.keys().collect::<Vec<&u64>>(), "steps with a held-out loss");
        for (step, expected) in &expected.held_out {
            fleet.held_out[step].iter().for_each(|loss| assert_near(*loss, *expected, *step));
        }
        self.fleet
    }
}

fn assert_near(loss: f64, expected: f64, step: u64) {
    let off = (loss - expected).abs() / expected.abs();
    assert!(off <= TOLERANCE, "step {step}: {loss} for {expected}, {off:e} off");
}

fn restored(fleet: &Fleet) -> usize {
    fleet.changes.iter().filter(|change| matches!(change, Change::Restored { .. })).count()
}

fn started(fleet: &Fleet) -> usize {
    fleet.changes.iter().filter(|change| matches!(change, Change::Started)).count()
}

/// Steps that were done more than once.
fn done_again(fleet: &Fleet) -> u64 {
    fleet.losses.values().map(|epochs| epochs.len() as u64 - 1).sum()
}

fn uninterrupted() {
    for shape in 0..3 {
        let fleet = Course::new(3, shape, 1_000, DEVICE_BYTES).check();
        assert_eq!((restored(&fleet), done_again(&fleet)), (0, 0));
    }
}

fn joined() {
    for shape in 0..3 {
        let mut course = Course::new(2, shape, 1_000, DEVICE_BYTES);
        course.fleet.until_step(8);
        let before = course.fleet.process_ids();
        course.fleet.add("w2");
        let fleet = course.check();
        assert!(fleet.process_ids().is_superset(&before), "survivors keep their processes");
        assert_eq!((restored(&fleet), done_again(&fleet)), (0, 0));
        assert!(started(&fleet) >= 2, "the newcomer changed nothing");
    }
}

/// A newcomer that takes its time before it can take any state: the others wait for it.
fn late() {
    let late = Some("w2".to_owned());
    let mut course = Course::of(2, 0, 1_000, |usual| Description { late, ..usual });
    course.fleet.until_step(8);
    course.fleet.add("w2");
    let fleet = course.check();
    assert_eq!((restored(&fleet), done_again(&fleet), started(&fleet)), (0, 0, 2));
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb) % bound
    }
}

/// One worker at a time is killed at any moment, and another one comes.
fn killed() {
    let first = number("SHOAL_SEED", 0);
    for seed in first..first + number("SHOAL_SEEDS", SEEDS) {
        let mut dice = Dice(seed);
        let mut course = Course::new(3 + dice.below(2) as usize, dice.below(3), 1_000, DEVICE_BYTES);
        let kills = 1 + dice.below(2);
        for kill in 0..kills {
            let fleet = &mut course.fleet;
            fleet.until_step(4 + 25 * kill + dice.below(15));
            // In the middle of whatever is under way then.
            for _ in 0..dice.below(4) {
                fleet.pass();
            }
            let members = fleet.members();
            let Some(victim) = members.get(dice.below(members.len().max(1) as u64) as usize).cloned() else {
                continue;
            };
            fleet.kill(&victim);
            if dice.below(2) == 0 {
                fleet.add(&format!("n{kill}"));
            }
        }
        let survivors = course.fleet.process_ids();
        let fleet = course.check();
        let kept: BTreeSet<u32> = fleet.process_ids().intersection(&survivors).copied().collect();
        assert_eq!(kept, survivors, "seed {seed}: survivors keep their processes");
        let again = done_again(&fleet);
        assert!(again + fleet.job().undone <= 2 * kills, "seed {seed}: {again} steps done again");
        assert_eq!(restored(&fleet), 0, "seed {seed}: one loss at a time needs no checkpoint");
        println!("  seed {seed}: {kills} killed, {} plans, {again} steps done again", started(&fleet));
    }
}

/// A newcomer's plan is on its way when one of those concerned is killed.
fn killed_while_moving() {
    for seed in 0..number("SHOAL_SEEDS", SEEDS) {
        let mut dice = Dice(100 + seed);
        let mut course = Course::new(3, seed, 1_000, DEVICE_BYTES);
        let fleet = &mut course.fleet;
        fleet.until_step(6 + dice.below(10));
        fleet.add("new");
        fleet.until("the move", |fleet| matches!(fleet.job().phase, Phase::Moving { .. }));
        (0..dice.below(6)).for_each(|_| fleet.pass());
        let victim = ["w0", "w1", "w2", "new"][dice.below(4) as usize];
        fleet.kill(victim);
        let survivors = fleet.process_ids();
        let fleet = course.check();
        assert_eq!(fleet.process_ids(), survivors, "survivors keep their processes");
        assert_eq!(restored(&fleet), 0, "seed {seed}: one loss needs no checkpoint");
        let again = done_again(&fleet);
        assert!(again <= 2, "seed {seed}: {again} steps done again");
        println!("  seed {seed}: {victim} killed, {} plans, {again} steps done again", started(&fleet));
    }
}

/// A worker stops in its tracks. The others go on without it; when it wakes it does nothing of what it was at, and joins
/// as another one.
fn frozen() {
    for shape in 0..3 {
        let mut course = Course::new(3, shape, 1_000, DEVICE_BYTES);
        course.fleet.until_step(10);
        let victim = course.fleet.members()[shape as usize].clone();
        course.fleet.freeze(&victim, true);
        let gone = victim.clone();
        course.fleet.until("a plan without it", |fleet| !fleet.members().contains(&gone));
        let step = (course.fleet.job().committed + 3).min(STEPS);
        course.fleet.until_step(step);
        course.fleet.freeze(&victim, false);
        course.fleet.until("its return", |fleet| fleet.lives(&gone) == 2);
        let fleet = course.check();
        assert_eq!(restored(&fleet), 0);
        assert!(done_again(&fleet) <= 2);
    }
}

/// A worker whose work lasts longer than was predicted is found out by its own steps.
fn slow() {
    let slow = Some(("w1".to_owned(), 6));
    let fleet = Course::of(3, 0, 1_000, |usual| Description { slow, ..usual }).check();
    assert!(fleet.pace("w1").is_some_and(|percent| percent >= 500), "{:?}", fleet.pace("w1"));
}

/// A slice's two holders are lost at once: back to the last checkpoint.
fn two_at_once() {
    for shape in 0..3 {
        let mut course = Course::new(4, shape, 10, DEVICE_BYTES);
        course.fleet.until("a checkpoint", |fleet| !fleet.job().checkpoints.is_empty());
        let step = (course.fleet.job().committed + 3).min(STEPS);
        course.fleet.until_step(step);
        let members = course.fleet.members();
        let holders = course.fleet.job().held().expect("a plan is in force").holders[0].clone();
        holders.iter().for_each(|place| course.fleet.kill(&members[*place]));
        let fleet = course.check();
        assert_eq!(restored(&fleet), 1, "shape {shape}: {:#?}", fleet.changes);
        assert!(fleet.job().undone > 0);
    }
}

/// A worker leaves in good order: its state goes to the others, which need nothing from a checkpoint.
fn taken_away() {
    for shape in 0..3 {
        let mut course = Course::new(3, shape, 1_000, DEVICE_BYTES);
        course.fleet.until_step(10);
        let leaving = course.fleet.members()[0].clone();
        course.fleet.take_away(&leaving, 20_000);
        let gone = leaving.clone();
        course.fleet.until("its leave", move |fleet| !fleet.members().contains(&gone));
        while !course.fleet.ended().contains(&leaving) {
            course.fleet.pass();
        }
        course.fleet.kill(&leaving);
        let fleet = course.check();
        assert_eq!((restored(&fleet), done_again(&fleet)), (0, 0));
    }
}

/// The controller is gone for a while, short or long, and goes on from its log.
fn controller_lost() {
    for away_ms in [200, 3_000] {
        let mut course = Course::new(3, away_ms % 3, 1_000, DEVICE_BYTES);
        course.fleet.until_step(12);
        let before = course.fleet.process_ids();
        course.fleet.lose_controller();
        std::thread::sleep(std::time::Duration::from_millis(away_ms));
        course.fleet.open();
        let fleet = course.check();
        assert_eq!(fleet.process_ids(), before, "workers keep their processes");
        assert_eq!(restored(&fleet), 0);
    }
}

fn paused() {
    let mut course = Course::new(3, 1, 1_000, DEVICE_BYTES);
    course.fleet.until_step(12);
    course.fleet.wish(Wish::Pause);
    course.fleet.until("the pause", |fleet| matches!(fleet.job().phase, Phase::Resting(Rest::Paused)));
    let at = course.fleet.job().committed;
    assert!((12..STEPS).contains(&at), "{at}");
    for _ in 0..20 {
        course.fleet.pass();
    }
    assert_eq!(course.fleet.job().committed, at, "nothing runs");
    course.fleet.wish(Wish::Run);
    let fleet = course.check();
    assert_eq!(done_again(&fleet), 0);
}

/// Devices with room for one plan at a time: the old one's share waits in host memory while the new one's comes.
fn little_room() {
    let shape = 0;
    let plans = [(1, 2), (2, 3)].map(|(request, workers)| tables::shaped(shape + request, workers));
    let device_bytes = plans.iter().map(tables::device_bytes).max().expect("two plans");
    let mut course = Course::new(2, shape, 1_000, device_bytes);
    course.fleet.until_step(8);
    course.fleet.add("w2");
    let fleet = course.check();
    assert_eq!((restored(&fleet), done_again(&fleet)), (0, 0));
    assert!(started(&fleet) >= 2, "the newcomer changed nothing");
    let waited = fleet.notices.iter().any(|notice| notice.contains("waits in host memory"));
    assert!(waited, "both fitted into {device_bytes} bytes: {:#?}", fleet.notices);
}

/// A job whose losses are no numbers rests at once, saved as it was before that step, and its owner is told which. Nobody is
/// blamed, and nothing is tried again until its owner wishes so.
fn not_a_number() {
    let mut course = Course::of(3, 0, 1_000, |usual| Description { lr: 1e30, ..usual });
    let fleet = &mut course.fleet;
    let fails = |fleet: &mut Fleet, step: u64| {
        fleet.until("its failure", |fleet| matches!(fleet.job().phase, Phase::Resting(Rest::Failed)));
        let job = fleet.job();
        let reason = job.failure.clone().unwrap_or_default();
        assert!(reason.contains(&format!("step {step}:")), "{reason}");
        assert!(reason.contains("the loss is ") && reason.contains("not a finite number"), "{reason}");
        assert_eq!((job.committed, job.saved_step(), job.undone), (step, step, 0));
    };
    fails(fleet, 2);
    let plans = started(fleet);
    (0..20).for_each(|_| fleet.pass());
    assert_eq!((plans, started(fleet)), (1, 1), "another plan was tried");
    fleet.wish(Wish::Run);
    fails(fleet, 3);
    assert_eq!((started(fleet), restored(fleet)), (2, 0));
    assert!(fleet.ended().is_empty(), "workers stay for other jobs");
    assert!(fleet.quarantined.is_empty(), "{:?} are blamed", fleet.quarantined);
}

/// Held-out losses are those of one device, whatever the plan; and whoever is killed while they are measured costs no step.
fn held_out() {
    let (every, kills) = (20, 2);
    let mut broken_off = 0;
    for shape in 0..3 {
        let mut course =
            Course::of(3, shape, 1_000, |usual| Description { eval_every: Some(every), ..usual });
        for kill in 1..=kills {
            let fleet = &mut course.fleet;
            let told_of = |step: u64| move |fleet: &Fleet| fleet.losses.contains_key(&step);
            fleet.until("a step", told_of(every * kill - 5));
            let began = Instant::now();
            fleet.until("the last one before", told_of(every * kill - 1));
            // Half a step after the end of the next one, whose loss is told when what is held out has been measured.
            let (seen, step) = (Instant::now(), began.elapsed() / 4);
            while seen.elapsed() < step + step / 2 {
                fleet.pass();
            }
            if let Some(victim) = fleet.members().last().cloned() {
                fleet.kill(&victim);
                fleet.add(&format!("n{kill}"));
            }
        }
        let fleet = course.check();
        let job = fleet.job();
        assert_eq!((job.undone, restored(&fleet)), (0, 0), "a death while nothing is trained costs no step");
        broken_off += fleet.unmeasured.iter().filter(|step| step.is_multiple_of(every)).count();
    }
    assert!(broken_off > 0, "nobody was killed while held-out loss was measured");
    println!("  {broken_off} of {} deaths came while it was measured", 3 * kills);
}
