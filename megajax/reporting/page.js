const plots=[...document.querySelectorAll(".plot")].map(box=>({box,svg:box.querySelector("svg"),
  cursor:box.querySelector(".cursor"),data:JSON.parse(box.querySelector("script").textContent.replaceAll("&lt;","<"))}));
const near=(xs,x)=>{let a=0,b=xs.length-1;while(a<b){const m=(a+b)>>1;if(xs[m]<x)a=m+1;else b=m}
  return a>0&&x-xs[a-1]<xs[a]-x?a-1:a};
const text=(v,p)=>v===null?"not finite":p?(100*v).toFixed(2)+"%":Math.abs(v)>=1e-3&&Math.abs(v)<1e6||v===0?
  v.toLocaleString("en",{maximumSignificantDigits:5}):v.toExponential(3);
const element=(name,className,words)=>{const e=document.createElement(name);e.className=className;if(words)e.textContent=words;return e};
function show(step,over){for(const p of plots){const d=p.data,at=d.left+(step-d.first)/(d.last-d.first)*(d.right-d.left);
  p.cursor.setAttribute("x1",at);p.cursor.setAttribute("x2",at);p.cursor.style.visibility="visible";
  p.tip?.remove();if(p!==over)continue;
  const tip=p.tip=element("div","tip");tip.append(element("div","","step "+Math.round(step).toLocaleString("en")));
  for(const s of d.series){const i=near(s.x,step),row=element("div","c"+s.color);row.append(element("i",""));
    row.append(s.name+": "+text(s.y[i],d.percent)+(Math.abs(s.x[i]-step)>=1?" (step "+s.x[i].toLocaleString("en")+")":""));
    tip.append(row)}
  const reach=6*(d.last-d.first)/(d.right-d.left);
  for(const [x,words] of [...d.crosses.map(([x,k])=>[x,"step "+x+": "+k]),...d.marks])
    if(Math.abs(x-step)<=reach&&tip.childElementCount<12)tip.append(element("div","note",words));
  p.box.append(tip);const share=at/d.width;
  if(share>.6)tip.style.right=(100*(1-share)+1)+"%";else tip.style.left=(100*share+1)+"%"}}
function hide(){for(const p of plots){p.cursor.style.visibility="hidden";p.tip?.remove()}}
for(const p of plots){p.box.addEventListener("pointermove",e=>{const r=p.svg.getBoundingClientRect(),d=p.data;
  const at=(e.clientX-r.left)/r.width*d.width;
  if(at<d.left-6||at>d.right+6||!d.series.length)return hide();
  const step=d.first+(at-d.left)/(d.right-d.left)*(d.last-d.first),xs=d.series[0].x;
  show(d.last-d.first<=4000?Math.min(Math.max(Math.round(step),xs[0]),xs[xs.length-1]):xs[near(xs,step)],p)});
  p.box.addEventListener("pointerleave",hide)}
