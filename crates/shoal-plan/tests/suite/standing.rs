//! Where survivors go, whatever they were in the middle of.

use shoal_model::{Chain, presets};
use shoal_plan::one_device::table;
use shoal_plan::{
    Activations, Closing, DeviceOffer, Disagreement, Held, Holder, Plan, Samples, Standing, StepShape, agree,
    meet,
};

/// Three devices; the first two each have all of every tensor but the last, which the third keeps.
fn plan() -> Plan {
    let chain = Chain::new(&presets::gpt2(50, 16, 2, 4, 12));
    let step = StepShape { global_batch: 4, sequence: 8, ..StepShape::ADAM };
    let offer =
        DeviceOffer { name: "device 0".into(), budget_bytes: 1 << 30, workspace_bytes: 0, rows_enough: 1 };
    let mut plan = table(&chain, step, &offer, 4, Activations::Keep, false);
    for device in 1..3 {
        plan.devices.push(plan.devices[0].clone());
        plan.devices[device].name = format!("device {device}");
    }
    let last = plan.tensors.len() - 1;
    for (tensor, row) in plan.tensors.iter_mut().enumerate() {
        let slice = Samples { start: 0, end: row.elements };
        let holders = if tensor == last { vec![2] } else { vec![0, 1] };
        let held = |device| Held { holder: Holder::Device(device), slice };
        row.optimizer = holders.into_iter().map(held).collect();
        row.gradient.clone_from(&row.optimizer);
    }
    plan
}

fn closing(step: u64) -> Closing {
    Closing {
        step,
        loss: 2.5.into(),
        norm_squared: f64::INFINITY.into(),
        targets: 32,
        correct: (step as f64).into(),
    }
}

/// At a step, with the sums that led there.
fn at(step: u64) -> Standing {
    Standing { closing: step.checked_sub(1).map(closing), ..Standing::at(step) }
}

#[test]
fn where_nobody_knows_the_closing_sums_all_stay() {
    let survivors = [(0, at(7)), (1, Standing { reduced: true, ..at(7) }), (2, at(7))];
    let target = agree(&plan(), &survivors).unwrap();
    assert_eq!((target.step, target.closing), (7, Some(closing(6))));
    assert!(target.lost.is_empty());
    // At the start of a run there is no step before.
    let target = agree(&plan(), &[(0, at(0)), (1, at(0))]).unwrap();
    assert_eq!((target.step, target.closing), (0, None));
}

#[test]
fn whoever_knows_them_takes_all_others_along() {
    let behind = Standing { reduced: true, ..at(7) };
    let knows = Standing { closing: Some(closing(7)), reduced: true, ..at(7) };
    let partly = Standing { applied: true, ..knows };
    for ahead in [knows, partly, at(8)] {
        let target = agree(&plan(), &[(0, ahead), (1, behind), (2, knows)]).unwrap();
        assert_eq!((target.step, target.closing), (8, Some(closing(7))));
    }
}

#[test]
fn sums_that_only_the_dead_knew_may_have_been_told() {
    let behind = [(1, Standing { reduced: true, ..at(7) })];
    assert_eq!(meet(7, None, &behind), Ok((7, Some(closing(6)))));
    assert_eq!(meet(8, Some(closing(7)), &behind), Ok((8, Some(closing(7)))));
    assert_eq!(meet(8, None, &behind), Err(Disagreement::NoClosing { device: 1, step: 7 }));
}

#[test]
fn slices_without_a_survivor_are_named() {
    let plan = plan();
    let last = plan.tensors.len() - 1;
    let slice = Samples { start: 0, end: plan.tensors[last].elements };
    assert_eq!(agree(&plan, &[(0, at(3)), (1, at(3))]).unwrap().lost, [(last, slice)]);
    assert_eq!(agree(&plan, &[(1, at(3)), (2, at(3))]).unwrap().lost, []);
    assert_eq!(agree(&plan, &[(2, at(3))]).unwrap().lost.len(), last);
}

#[test]
fn what_no_verified_program_leads_to_is_refused() {
    let plan = plan();
    let refused = |survivors: &[(usize, Standing)]| agree(&plan, survivors).unwrap_err();
    assert_eq!(refused(&[]), Disagreement::Nobody);
    assert_eq!(refused(&[(0, at(5)), (1, at(7))]), Disagreement::Apart { device: 0, step: 5, target: 7 });
    assert_eq!(refused(&[(0, at(6)), (1, at(7))]), Disagreement::NotReduced { device: 0, step: 6 });
    let forgot = Standing { closing: None, ..at(7) };
    let behind = Standing { reduced: true, ..at(6) };
    assert_eq!(refused(&[(0, behind), (1, forgot)]), Disagreement::NoClosing { device: 0, step: 6 });
    let partly = Standing { applied: true, ..at(7) };
    assert_eq!(refused(&[(0, partly)]), Disagreement::NoClosing { device: 0, step: 7 });
    let other = Standing { closing: Some(Closing { targets: 1, ..closing(6) }), ..at(7) };
    assert_eq!(refused(&[(0, at(7)), (1, other)]), Disagreement::OtherClosing { device: 1, step: 6 });
}

/// Infinities and all bits of a sum arrive as they left.
#[test]
fn a_standing_survives_json() {
    let odd = f64::from_bits(0x3fb9_9999_9999_999b);
    for norm in [odd, f64::INFINITY, f64::NAN, -0.0] {
        let told = Closing { norm_squared: norm.into(), ..closing(3) };
        let standing = Standing { closing: Some(told), ..at(4) };
        let text = serde_json::to_string(&standing).unwrap();
        let heard: Standing = serde_json::from_str(&text).unwrap();
        assert_eq!(heard, standing);
        assert_eq!(f64::from(heard.closing.unwrap().norm_squared).to_bits(), norm.to_bits());
    }
}
