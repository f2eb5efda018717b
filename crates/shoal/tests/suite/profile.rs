//! `shoal profile` on the processor: what it writes can be read, reckoned with, and added to another machine's.

use crate::common::{Folder, Outcome};
use shoal_fleet::{Costs, Fleet, Profile};
use shoal_model::{Model, Precision};

fn profile(folder: &Folder, more: &[&str]) -> Outcome {
    let usual =
        ["profile", "gpt2-tiny", "--device", "cpu", "--threads", "1", "--rounds", "1", "--samples", "2,1,2"];
    folder.shoal(&[&usual[..], more].concat())
}

#[test]
fn a_profile_holds_what_costs_need() {
    let folder = Folder::empty();
    profile(&folder, &["--sequence", "32"]).succeeds();
    let profile = Profile::read(&folder.join("profile.json")).unwrap();
    let device = &profile.devices[0];
    // Both blocks are one row.
    assert_eq!((profile.model.as_str(), profile.sequence, device.layers.len()), ("gpt2-tiny", 32, 3));
    assert!(device.update_seconds_per_parameter.is_some_and(|seconds| seconds > 0.0));
    assert_eq!(device.step.as_ref().unwrap().samples, [1, 2]);
    // It may be too little to show here, beside other tests; never less than nothing, or what a copy of a byte cannot take.
    assert!(device.handling_seconds_per_byte.is_none_or(|seconds| (0.0..1e-7).contains(&seconds)));
    assert_eq!(profile.device("CPU", Precision::Fp32).unwrap().kind, device.kind);

    let text = format!(
        "[[node]]\nhost_memory = \"1 GiB\"\nhost_link = \"1 GB/s\"\n\
         devices = [{{ kind = {:?}, memory = \"1 GiB\" }}]",
        device.kind
    );
    let fleet = Fleet::parse(&text, "fleet.toml").unwrap();
    let chain = Model::preset("gpt2-tiny").unwrap().chain();
    let costs = Costs::new(&chain, &fleet, Some(&profile), Precision::Fp32, 32).unwrap();
    assert!(!costs.estimated(&device.kind));
    assert_eq!(costs.forward(1, 0, 2), device.layer("block 0").unwrap().forward.seconds[1]);
}

#[test]
fn a_few_blocks_say_what_all_of_them_take() {
    let folder = Folder::empty();
    profile(&folder, &["--sequence", "32", "--blocks", "1"]).succeeds();
    let profile_of = |name: &str| Profile::read(&folder.join(name)).unwrap();
    let device = &profile_of("profile.json").devices[0];
    let rows: Vec<usize> = device.layers.iter().map(|row| row.layers.len()).collect();
    assert_eq!(rows, [1, 2, 1], "embedding, both blocks, head");
    let step = &device.step.as_ref().unwrap().seconds;
    // The block that was left out is in the step, beside what was measured of the rest.
    let block = device.layer("block 1").unwrap();
    let left_out = block.forward.seconds[1] + block.backward.seconds[1];
    assert!(step[1] > left_out, "{step:?}");

    profile(&folder, &["--blocks", "3"]).fails(&["--blocks", "the model has 2"], "leave it out");
    profile(&folder, &["--blocks", "0"]).fails(&["--blocks", "one at least"], "leave it out");
    let images = ["profile", "vgg11", "--device", "cpu", "--blocks", "1", "--samples", "1"];
    folder.shoal(&images).fails(&["--blocks", "convolutional"], "leave it out");
}

#[test]
fn profiles_of_other_machines_are_added_and_other_models_refused() {
    let folder = Folder::empty();
    profile(&folder, &["--sequence", "32", "--out", "here.json"]).succeeds();
    let mut there = Profile::read(&folder.join("here.json")).unwrap();
    there.devices[0].kind = "T4".into();
    there.write(&folder.join("there.json")).unwrap();
    profile(&folder, &["--sequence", "32", "--merge", "there.json"]).succeeds();
    let merged = Profile::read(&folder.join("profile.json")).unwrap();
    assert_eq!(merged.devices.len(), 2);
    assert!(merged.device("T4", Precision::Fp32).is_some());

    let refused = ["--sequence", "16", "--merge", "there.json"];
    profile(&folder, &refused).fails(&["contradict", "16 rows", "of 32"], "measure");
    profile(&folder, &["--merge", "nowhere.json"]).fails(&["nowhere.json"], "check the path");
}
